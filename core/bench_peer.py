"""The peer of the bench: transformers' ``generate`` on the very weights that Redline runs.

Target and draft run in bfloat16. With an assistant it is transformers' assisted generation (speculative
sampling, constant K, no confidence threshold): the embedded draft is given to it as a Llama of its own with
the target's embedding, its head as trimmed as Redline's, the logits of the other ids minus infinity, so that
the peer pays for no more than Redline does. Knows neither engine nor report.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from core.models.draft_file import load_draft


class Clock(transformers.generation.streamers.BaseStreamer):
    """Notes when tokens come and how many; ``generate`` first hands the prompt over."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        pass


class TrimmedHead(torch.nn.Module):
    """Hidden states (..., hidden) to logits (..., vocabulary): of ``ids`` by two products, elsewhere -inf."""

    def __init__(self, projection: torch.Tensor, embedding: torch.Tensor, ids: torch.Tensor):
        super().__init__()
        self.vocabulary = len(embedding)
        self.register_buffer("projection", projection)
        self.register_buffer("rows", embedding[ids])
        self.register_buffer("ids", ids)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scored = (hidden @ self.projection.T) @ self.rows.T
        logits = scored.new_full((*scored.shape[:-1], self.vocabulary), -torch.inf)
        logits[..., self.ids] = scored
        return logits


def target_model(folder: Path) -> transformers.PreTrainedModel:
    """The target in ``folder``, as transformers runs it."""
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def assistant_model(target: transformers.PreTrainedModel, draft_file: Path) -> transformers.PreTrainedModel:
    """The packed draft as an assistant for ``target``. Raises LoadError where the file cannot be read."""
    draft = load_draft(draft_file)
    config = target.config.to_dict() | {"num_hidden_layers": draft.layers}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).to(torch.bfloat16).eval()
    embedding = target.get_input_embeddings().weight.detach()
    own = {name: value for name, value in draft.tensors.items() if name.startswith(("layers.", "norm."))}
    model.model.load_state_dict(own | {"embed_tokens.weight": embedding})
    projection = draft.tensors["proj.weight"].to(torch.bfloat16)
    model.lm_head = TrimmedHead(projection, embedding, draft.head_ids)
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


def generate(
    model: transformers.PreTrainedModel,
    ids: Sequence[int],
    end_ids: frozenset[int],
    temperature: float,
    max_new_tokens: int,
    seed: int,
    assistant: transformers.PreTrainedModel | None = None,
    num_draft_tokens: int = 0,
) -> dict[str, float]:
    """One reply, sampled as Redline samples it.

    Gives the times of ``core.bench_report.Sample``: ``tokens`` were decoded in ``decode_seconds``, after the
    first ones had come with the prompt.
    """
    sampling = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    if assistant is not None:
        assistant.generation_config.num_assistant_tokens = num_draft_tokens
        sampling["assistant_model"] = assistant
    end = sorted(end_ids)
    batch = torch.tensor([list(ids)])
    clock = Clock()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        start = time.perf_counter()
        out = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=max_new_tokens,
            eos_token_id=end,
            pad_token_id=end[0],
            streamer=clock,
            **sampling,
        )
        stop = time.perf_counter()
    first = clock.times[1]
    return {
        "tokens": out.shape[1] - len(ids) - clock.counts[1],
        "decode_seconds": stop - first,
        "ttft_seconds": first - start,
        "seconds": stop - start,
    }
