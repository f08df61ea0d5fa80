"""Fields of OpenAI's and vLLM's requests that kvrelay knows and does not act on."""

from typing import Any

# Known fields that nothing here acts on yet, with the values that ask for nothing. None always does.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "documents": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "grammar": (),
    "json_schema": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "priority": (0,),
}
# Fields of other routes than this one, likewise.
ELSEWHERE: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "top_logprobs": (),
    "best_of": (1,),
    "echo": (False,),
}
# Hints about the caller or the cache: they cannot change an answer.
WITHOUT_EFFECT = frozenset({"safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
