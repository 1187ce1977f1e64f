"""The keys of tokenizer.json and tokenizer_config.json, and the effect of each.

The keys are those in the `tokenizers` library's file, and in transformers' PreTrainedTokenizerBase, TokenizersBackend
(PreTrainedTokenizerFast), LlamaTokenizer and Qwen2Tokenizer.
"""

from typing import Final

from gpulease.client.decode.file_keys import KeyTable, no_effect, refused, used

TOKENIZER_KEYS: Final[KeyTable] = {
    **used("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model"),
    # Left over from training. transformers and this engine turn both off: a prompt is never cut or padded.
    **no_effect("truncation", "padding"),
    **no_effect("version"),
}
"""Keys of tokenizer.json, which the library reads."""

MODEL_KEYS: Final[KeyTable] = {
    **used(
        "type",
        "vocab",
        "merges",
        "unk_token",
        "unk_id",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "max_input_chars_per_word",
        "fuse_unk",
        "byte_fallback",
        "ignore_merges",
    ),
    **refused("the engine cuts a text the same way each time", {"dropout": (0.0,)}),
}
"""Keys of its model."""

SETTINGS_KEYS: Final[KeyTable] = {
    **used(
        "chat_template",
        "tokenizer_class",
        "add_bos_token",
        "add_prefix_space",
        "added_tokens_decoder",
        "additional_special_tokens",
        "extra_special_tokens",
        # bos_token and similar ones, and tokens that a template refers to, such as image_token.
        "*_token",
    ),
    **refused("the engine puts nothing after a prompt", {"add_eos_token": (False,)}),
    **refused("the engine takes names of special tokens as those", {"split_special_tokens": (False,)}),
    **refused("the engine cuts texts by tokenizer.json", {"fix_mistral_regex": (False,), "do_lower_case": (False,)}),
    **no_effect(
        # How transformers truncates, pads and names its outputs at the caller's request.
        "model_max_length",
        "max_len",
        "max_length",
        "model_input_names",
        "padding_side",
        "pad_to_multiple_of",
        "pad_token_type_id",
        "stride",
        "truncation_side",
        "truncation_strategy",
        "return_token_type_ids",
        "verbose",
        # For vocabularies in other files, which tokenizer.json replaces.
        "errors",
        "from_slow",
        "legacy",
        "sp_model_kwargs",
        "spaces_between_special_tokens",
        "vocab_file",
        "merges_file",
        # transformers 5 does not clean up spaces for byte-level BPE.
        "clean_up_tokenization_spaces",
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
        # For default system prompts in templates of old versions.
        "use_default_system_prompt",
        # For parsing answers, which this engine leaves to the caller.
        "chat_control_tokens",
        "response_schema",
        "response_template",
        # Its origin.
        "_commit_hash",
        "auto_map",
        "backend",
        "files_loaded",
        "is_local",
        "name_or_path",
        "processor_class",
        "special_tokens_map_file",
        "tokenizer_file",
        "transformers_version",
        "trust_remote_code",
        "use_fast",
    ),
}
"""Keys of tokenizer_config.json, and of special_tokens_map.json."""
