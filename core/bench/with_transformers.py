"""A peer of the bench: transformers' ``generate`` on the very weights that Redline runs.

Target and draft run in bfloat16, or where Redline runs them through bitsandbytes in that form. With an
assistant it is transformers' assisted generation (speculative sampling, constant K, no confidence threshold).
A distilled draft of kind model, for the embedded target the one that ships, is given to it as a Llama of its
own with the target's embedding, the head as trimmed as Redline's, the logits of the other ids minus infinity,
so that the peer pays for no more than Redline does. EAGLE and Medusa are none that it can run.
Knows neither engine nor report.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from core.machine.progress import Progress
from core.models import quantize
from core.models.checkpoint import fetch, inspect
from core.models.embedded import DRAFTS
from core.models.sources import EMBEDDED
from core.pairs.draft_file import load_draft, load_metadata
from core.pairs.spec import PairSpec, draft_folder
from core.records import PairInfo

Model = transformers.PreTrainedModel
_NOT_A_LLAMAS = ("architectures", "layer_types", "model_type", "quantization_config")  # of a target's config


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

    def __init__(self, projection: torch.Tensor, head: torch.Tensor, ids: torch.Tensor):
        super().__init__()
        self.vocabulary = len(head)
        self.register_buffer("projection", projection)
        self.register_buffer("rows", head[ids])
        self.register_buffer("ids", ids)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scored = (hidden @ self.projection.T) @ self.rows.T
        logits = scored.new_full((*scored.shape[:-1], self.vocabulary), -torch.inf)
        logits[..., self.ids] = scored
        return logits


def load(spec: PairSpec, info: PairInfo, say: Progress) -> tuple[Model, Model | None]:
    """Target and draft of ``spec``, which are on this machine, as transformers runs them.

    None for a draft that it cannot run. ``info`` is of the same pair as Redline loaded it. Raises LoadError.
    """
    target = load_model(spec.target, info.quantization, info.device, say)
    if not spec.draft:
        return target, None
    distilled = DRAFTS / "draft-model.safetensors" if spec.draft == EMBEDDED else draft_folder(spec.draft)
    if distilled:
        runs = load_metadata(distilled).get("kind") == "model"
        return target, distilled_assistant(target, distilled) if runs else None
    return target, as_assistant(load_model(spec.draft, info.draft_quantization, info.device, say))


def load_model(source: str, form: str, device: str, say: Progress) -> Model:
    """The model ``source`` names (``core.models.sources``), in ``form`` (``PairInfo``). Raises LoadError."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # peers use what transformers is about to rename
    checkpoint = fetch(inspect(source, say), say)
    how = dict(dtype=torch.bfloat16, device_map={"": device}, local_files_only=True, trust_remote_code=False)
    if checkpoint.gguf_file:
        how |= dict(
            gguf_file=checkpoint.gguf_file, quantization_config=transformers.GgufConfig(dequantize=True)
        )
    elif (config := quantize.loading_config(form.replace("llm.int8", "llm-int8"), "bfloat16")) is not None:
        how |= dict(quantization_config=config)
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint.folder, **how).eval()


def as_assistant(model: Model) -> Model:
    """``model``, told to draft as many tokens in every round as it is asked for."""
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


def distilled_assistant(target: Model, path: Path) -> Model:
    """The packed draft as an assistant for ``target``. Raises LoadError where it cannot be read."""
    draft = load_draft(path)
    own = {name: value for name, value in draft.tensors.items() if name.startswith(("layers.", "norm."))}
    config = {name: value for name, value in target.config.to_dict().items() if name not in _NOT_A_LLAMAS}
    inner = len(own["layers.0.mlp.gate_proj.weight"])
    config |= dict(num_hidden_layers=draft.layers, intermediate_size=inner)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).to(torch.bfloat16).eval()
    embedding = target.get_input_embeddings().weight.detach().cpu()
    model.model.load_state_dict(own | {"embed_tokens.weight": embedding})
    projection = draft.tensors["proj.weight"].to(torch.bfloat16)
    head = target.get_output_embeddings().weight.detach().cpu()
    model.lm_head = TrimmedHead(projection, head, draft.head_ids)
    return as_assistant(model.to(target.device))


def generate(
    model: Model,
    ids: Sequence[int],
    end_ids: frozenset[int],
    temperature: float,
    max_new_tokens: int,
    seed: int,
    assistant: Model | None = None,
    num_draft_tokens: int = 0,
) -> dict[str, float]:
    """One reply, sampled as Redline samples it.

    Gives the times of ``core.bench.measured.Sample``: ``tokens`` were decoded in ``decode_seconds``, after
    the first ones had come with the prompt.
    """
    sampling = {"do_sample": False, "repetition_penalty": 1.0}  # whatever the model suggests
    if temperature:
        sampling |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    if assistant is not None:
        assistant.generation_config.num_assistant_tokens = num_draft_tokens
        sampling["assistant_model"] = assistant
    end = sorted(end_ids)
    batch = torch.tensor([list(ids)], device=model.device)
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
