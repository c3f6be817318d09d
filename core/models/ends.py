"""Which ids end a reply of a target: what its tokenizer, configs, GGUF file and chat template say.

A model ends its turn with a token that one of these may know alone; missed, it goes on in the user's name. An
id that only a draft's files name is none: it may be an ordinary word of the target's. Knows no model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from core.text.detokenise import end_token_ids
from core.text.template import closing_ids

# What llama.cpp takes for the end of a generation by its text, whatever the file's keys say
# (src/llama-vocab.cpp, ``special_eog_ids``): ends of turns, messages and texts, and the marks of code
# infilling behind which a file ends.
_TEXTS = frozenset(
    """<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s>
    <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response>
    <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>
    <|file_sep|>""".split()
)
_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Where a model has these too, "<|end|>" ends a message within a reply, of which others follow.
_WHOLE_REPLIES = ({"<|return|>", "<|call|>"}, {"<|call|>", "<|flush|>"}, {"<|calls|>", "<|flush|>"})


def gguf_ends(said: Mapping, words: Sequence[str]) -> frozenset[int]:
    """Of a GGUF file: ``said`` are its single fields by key, ``words`` its vocabulary in order."""
    ids = {said.get(f"tokenizer.ggml.{key}_token_id") for key in _KEYS}
    ids = {id_ for id_ in ids if isinstance(id_, int) and id_ < len(words)}
    ids |= {id_ for id_, word in enumerate(words) if word in _TEXTS}
    if "<|tool_response>" in words:  # of a family whose "</s>" is text
        ids = {id_ for id_ in ids if words[id_] != "</s>"}
    return frozenset(id_ for id_ in ids if not _goes_on(words[id_], words))


def end_ids(tokenizer, *configs: Mapping | None, file: Collection[int] = ()) -> frozenset[int]:
    """All that end a reply; ``configs`` are those of model, text part and generation, ``file`` a GGUF's."""
    words = tokenizer.get_added_vocab()
    names = {id_: word for word, id_ in words.items()}
    closing = {id_ for id_ in closing_ids(tokenizer) if not _goes_on(names.get(id_, ""), words)}
    return end_token_ids(tokenizer, *configs) | closing | frozenset(file)


def _goes_on(word: str, words: Collection[str]) -> bool:
    return word == "<|end|>" and any(all(other in words for other in others) for others in _WHOLE_REPLIES)
