"""The peer runs the same draft and is told the same settings."""

import torch

from core import bench_peer
from core.models.embedded import DRAFT_FILE

PROMPT = "<|im_start|>user\nName three rivers.<|im_end|>\n<|im_start|>assistant\n"


def test_the_assistant_is_the_embedded_draft_and_changes_no_greedy_reply(embedded_pair, embedded_folder):
    target = bench_peer.target_model(embedded_folder)
    assistant = bench_peer.assistant_model(target, DRAFT_FILE)
    ids = embedded_pair.tokenizer(PROMPT)["input_ids"]
    drafter = embedded_pair.drafter
    with torch.inference_mode():
        theirs = assistant(torch.tensor([ids])).logits[0, -1].float()
        ours = drafter.model.next_logits(ids, drafter.new_state())
    inside = torch.zeros_like(theirs, dtype=torch.bool)
    inside[drafter.head_ids] = True
    assert theirs[~inside].max() == -torch.inf  # as trimmed as Redline's
    p, q = theirs[inside].softmax(0), ours.softmax(0)
    assert torch.minimum(p, q).sum() > 0.9  # up to bfloat16 there and 4 bits here

    def reply(**assistance):
        return bench_peer.generate(target, ids, embedded_pair.end_ids, 0, 12, 1, **assistance)

    alone, assisted = reply(), reply(assistant=assistant, num_draft_tokens=4)
    assert alone["tokens"] == 11
    assert 11 - 4 <= assisted["tokens"] <= 11
    assert 0 < assisted["ttft_seconds"] <= assisted["seconds"]
