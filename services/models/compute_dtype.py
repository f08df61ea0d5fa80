"""What `compute.dtype` means for a model."""

from schemas.errors import SetupError
from services.models.files import ModelFiles

INT8_FORMATS = ("Q4_0", "Q4_1", "Q8_0")
"""Formats of weights, in blocks of 32, that the arithmetic int8 multiplies as they are."""


def concrete_dtype(wanted: str, files: ModelFiles) -> str:
    """`wanted` is the setting; "auto" is int8 where every weight of a product is one of `INT8_FORMATS`, else bfloat16.

    Raises `SetupError` for an int8 that the weights do not allow.
    """
    formats = files.product_formats
    fits_int8 = bool(formats) and set(formats) <= set(INT8_FORMATS)
    if wanted == "auto":
        return "int8" if fits_int8 else "bfloat16"
    if wanted == "int8" and not fits_int8:
        raise SetupError(
            f"{files.name} cannot be computed in int8: its weights are {', '.join(formats) or 'safetensors'}, int8 "
            f"takes a GGUF with nothing but {', '.join(INT8_FORMATS)}: give such a file, or set compute.dtype to auto"
        )
    return wanted
