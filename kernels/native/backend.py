"""setuptools as build backend (PEP 517), asking for a compiler from PyPI where the machine has none."""

from typing import Any

from setuptools import build_meta

from kernels.native.build import CannotBuild, find_compiler

ZIG = "ziglang==0.15.2"  # clang and a C library in a wheel; pinned, since build dependencies see no constraints

build_sdist = build_meta.build_sdist
build_wheel = build_meta.build_wheel
build_editable = build_meta.build_editable
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_compiler()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(config_settings), *_compiler()]


def _compiler() -> list[str]:
    try:
        find_compiler()
    except CannotBuild:
        return [ZIG]
    return []
