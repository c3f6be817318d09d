"""Breaks the rule of speculative sampling in every way it is known to be broken, one at a time.

Each mutant is a copy of ``core`` with one line changed; the exactness and engine tests run against
the copy, and must notice. Prints a table; exit status 1 when a mutant survived or no longer applies.

Run: ``python tests/mutants.py [NAME ...]`` (part of ``make proof``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXACTNESS = ["tests/core/test_exactness.py", "tests/core/test_exactness_drafters.py"]
EXACTNESS += ["tests/core/test_exactness_trees.py"]
NAMES = "sampling tree batched batched_chains batched_trees device_tree"
NAMES += " drafters drafters_untrained reuse engine engine_trees decoder decoder_trees"
NAMES += " history rows store fake_card fake_pairs full_memory"
TESTS = [f"tests/core/test_{name}.py" for name in NAMES.split()]
TESTS += ["tests/core/test_rotary.py", "tests/core/test_ends.py", "tests/core/text/test_chat.py"]
TESTS += ["tests/core/pairs/test_load.py::test_end_ids_are_all_that_the_targets_files_name"]


@dataclass(frozen=True)
class Mutant:
    """``before`` occurs once in ``core/file`` and becomes ``after``."""

    name: str
    file: str
    before: str
    after: str


MUTANTS = [
    Mutant(
        "an end id from the draft",
        "pairs/general.py",
        "end_ids=_end_ids(target),",
        "end_ids=frozenset().union(*map(_end_ids, plans)),",
    ),
    Mutant(
        "a rotary table without scaling",
        "models/decoder.py",
        "frequencies=inner.rotary_emb.inv_freq.float().cpu(),",
        "frequencies=None,",
    ),
    Mutant(
        "a GGUF's scaling passed over",
        "pairs/plan.py",
        "rotary.settle(config, checkpoint.rotary)",
        "pass",
    ),
    Mutant(
        "a template searched for words",
        "text/template.py",
        "return self._render(changed, header) != text",
        "return str(content).strip() in text",
    ),
    Mutant("accept if u·q ≤ p", "verify/sampling.py", "return u * q < p", "return u * q <= p"),
    Mutant("accept always", "verify/sampling.py", "return u * q < p", "return p > 0"),
    Mutant("accept if p ≥ q only", "verify/sampling.py", "return u * q < p", "return q <= p"),
    Mutant("accept greedily: u < p, whatever q", "verify/sampling.py", "return u * q < p", "return u < p"),
    Mutant(
        "residual from p",
        "verify/sampling.py",
        "left = residual(p, q, weight)\n",
        "left = p.probabilities\n",
    ),
    Mutant("residual |p - q|", "verify/sampling.py", "return left.clamp_min_(0)", "return left.abs_()"),
    Mutant(
        "the residual's draw is u again",
        "verify/sampling.py",
        "yield _resampled(p, proposal.q, position, uniform())",
        "yield _resampled(p, proposal.q, position, u)",
    ),
    Mutant(
        "a zero residual draws nothing sensible",
        "verify/sampling.py",
        "left if left.sum() > 0 else p.probabilities",
        "left",
    ),
    Mutant(
        "bonus from the row before",
        "verify/sampling.py",
        "            return\n    yield _own(target(len(proposals)),",
        "            return\n    yield _own(target(max(0, len(proposals) - 1)),",
    ),
    Mutant(
        "p from the row before",
        "verify/sampling.py",
        "p = target(position)",
        "p = target(max(0, position - 1))",
    ),
    Mutant("block: the first failure ends it", "verify/sampling.py", "kept = max(", "kept = next("),
    Mutant(
        "block: weights not bounded",
        "verify/sampling.py",
        "min(1.0, weights[-1] * ratio)",
        "weights[-1] * ratio",
    ),
    Mutant(
        "block: weights of one token each",
        "verify/sampling.py",
        "min(1.0, weights[-1] * ratio)",
        "min(1.0, ratio)",
    ),
    Mutant(
        "block: residual without its weight", "verify/sampling.py", "uniform(), weights[kept])", "uniform())"
    ),
    Mutant(
        "block: thresholds as token-wise",
        "verify/sampling.py",
        "return weights, thresholds + weights[1:][-1:]",
        "return weights, weights[1:]",
    ),
    Mutant(
        "block: a draw more is kept", "verify/sampling.py", "if u < h), default=0)", "if u <= h), default=0)"
    ),
    Mutant(
        "top-p keeps one id too many",
        "verify/sampling.py",
        "(before < top_p).sum()",
        "(before <= values[0] + top_p).sum()",
    ),
    Mutant(
        "filters in another order",
        "verify/sampling.py",
        "if 0 < top_k < len(scaled):",
        "if top_p == 1 and 0 < top_k < len(scaled):",
    ),
    Mutant(
        "q from the unfiltered logits",
        "verify/tree.py",
        "found = siblings(q, soft, width, uniform, parent)",
        "bare = distributions(row, Settings(1.0), (), head_ids)[0]\n"
        "        found = [Proposal(sample(q, uniform()), bare, soft, parent)]",
    ),
    Mutant(
        "greedy draft, soft q",
        "verify/tree.py",
        "found = siblings(q, soft, width, uniform, parent)",
        "best = distributions(row, Settings(temperature=0), (), head_ids)[0]\n"
        "        found = [Proposal(sample(best, uniform()), q, soft, parent)]",
    ),
    Mutant(
        "draft at temperature 1",
        "verify/tree.py",
        "distributions(row, settings, sequence, head_ids)",
        "distributions(row, Settings(temperature=1.0), sequence, head_ids)",
    ),
    Mutant(
        "draft without its filters but with the target's q",
        "verify/tree.py",
        "found = siblings(q, soft, width, uniform, parent)",
        "bare = distributions(row, Settings(settings.temperature), (), head_ids)[0]\n"
        "        found = [Proposal(sample(bare, uniform()), q, soft, parent)]",
    ),
    Mutant(
        "a sibling is held against p itself",
        "verify/tree.py",
        "left = _without(left, proposal.q)",
        "left = p",
    ),
    Mutant(
        "all siblings refused: a draw from p",
        "verify/tree.py",
        "token_id = sample(left, uniform())",
        "token_id = sample(p, uniform())",
    ),
    Mutant(
        "a sibling has the first one's q",
        "verify/tree.py",
        "found.append(Proposal(q.id_of(index), q, soft, parent))",
        "found.append(Proposal(q.id_of(index), found[0].q if found else q, soft, parent))",
    ),
    Mutant(
        "a sibling's q is not normalised",
        "verify/tree.py",
        "Distribution(left / mass, q.ids)",
        "Distribution(left, q.ids)",
    ),
    Mutant(
        "a tree's child reads its uncle's row",
        "verify/tree.py",
        "row = 0 if node is None else node + 1",
        "row = 0 if node is None else node",
    ),
    Mutant(
        "device tree: a sibling is held against p itself",
        "engine/device_tree.py",
        "left = torch.where(refused, rest / mass, left)",
        "pass",
    ),
    Mutant(
        "device tree: all siblings refused: a draw from p",
        "engine/device_tree.py",
        "torch.cat([left, before[count:]]).index_select(0, stands)",
        "before.index_select(0, stands)",
    ),
    Mutant(
        "device tree: a sibling has the first one's q",
        "engine/device_tree.py",
        "q, there = torch.cat(qs), torch.cat(filled)",
        "q, there = torch.cat([row.p] * width), torch.cat(filled)",
    ),
    Mutant("device tree: accept if u·q ≤ p", "engine/device_tree.py", "(u * q_x < p_x)", "(u * q_x <= p_x)"),
    Mutant("device tree: an empty place is tried", "engine/device_tree.py", "kept = there & (u", "kept = (u"),
    Mutant(
        "device tree: siblings share a draw",
        "engine/device_tree.py",
        "(taken + tests).flatten()",
        "(taken + tests - places).flatten()",
    ),
    Mutant(
        "device tree: the target's own draw is the last test's",
        "engine/device_tree.py",
        "torch.where(leaf, at + 1, tried)",
        "torch.where(leaf, at, tried - 1).clamp_min(0)",
    ),
    Mutant(
        "device tree: draws of candidates are used again",
        "engine/device_figures.py",
        "return taken + sum(len(tried)",
        "return sum(len(tried)",
    ),
    Mutant(
        "device tree: what is left of a candidate's q is not normalised",
        "engine/device_tree.py",
        "torch.where(mass > 0, left / mass, left))",
        "left)",
    ),
    Mutant(
        "device tree: the penalty sees an uncle",
        "engine/device_tree.py",
        "rows.append(seen_behind(rows[-1],",
        "rows.append(seen_behind(rows[-1].any(0)[None],",
    ),
    Mutant(
        "device tree: empty places are overlooked where a branch is brought together",
        "engine/loop.py",
        "[played.rows[token.index] for",
        "[1 + token.index for",
    ),
    Mutant(
        "card: a branch is brought together by indices",
        "models/kv_cache.py",
        "torch.cat([part[:, :, places] for places in found], 2)",
        "part[:, :, [start + row for row in rows[still:]]]",
    ),
    Mutant(
        "card: rows at equal distances are those beside",
        "models/kv_cache.py",
        "places[end - 1] + 1, step)",
        "places[first] + end - first)",
    ),
    Mutant(
        "card: a tree's places go up",
        "models/decoder.py",
        "rotation = torch.cat(turns)",
        "rotation = self.rotations[depths(parents, start)]",
    ),
    Mutant(
        "a tree's rows are children of the root",
        "engine/rounds.py",
        "0 if p.parent is None else p.parent + 1 for p",
        "0 for p",
    ),
    Mutant(
        "a node sees every row before it",
        "models/tree_walk.py",
        "tree[first:end, : parent + 1] = tree[parent, : parent + 1]",
        "tree[first:end, : parent + 1] = 0",
    ),
    Mutant(
        "a branch is not laid over the one before",
        "models/tree_walk.py",
        "place[layer].copy_(new)",
        "place[layer].copy_(new) if asking.shape[1] > 1 else None",
    ),
    Mutant(
        "a tree's rows lie in the order in which they were walked",
        "models/decoder.py",
        "place.copy_(new[:, walk.back])",
        "place.copy_(new)",
    ),
    Mutant(
        "a piece of a branch goes on behind its block of keys",
        "models/tree_walk.py",
        " or self.positions[place] % KEY_BLOCK == 0",
        "",
    ),
    Mutant(
        "a table that survives",
        "drafters/recycling.py",
        "        state.successors = {}\n",
        "",
    ),
    Mutant(
        "a copy that shares its table",
        "drafters/recycling.py",
        "return Table(dict(self.successors))",
        "return self",
    ),
    Mutant("a copy without its features", "models/kv_cache.py", "copy.features[:length] =", "_ ="),
    Mutant(
        "a draw that is used twice: by siblings",
        "verify/tree.py",
        "    for _ in range(count):\n        index = draw(q.probabilities, uniform())",
        "    u = uniform()\n    for _ in range(count):\n        index = draw(q.probabilities, u)",
    ),
    Mutant(
        "a draw that is used twice: by a refused candidate and the token in its place",
        "verify/tree.py",
        "token_id = sample(left, uniform())",
        "token_id = sample(left, u if candidates else uniform())",
    ),
    Mutant(
        "a candidate's overlap is with p, not with what its elder siblings left",
        "verify/tree.py",
        "shared = overlap(left, proposal.q)",
        "shared = overlap(p, proposal.q)",
    ),
    Mutant(
        "a tree takes one place past the context",
        "engine/rounds.py",
        "places >= target.tree_room(cache)",
        "places > target.tree_room(cache)",
    ),
    Mutant(
        "a refused end of text ends the reply",
        "engine/loop.py",
        "tokens |= self._unkept(played, index, verdict.figures)\n                    continue",
        "tokens |= self._unkept(played, index, verdict.figures)\n"
        "                    if outcome.id not in self._pair.end_ids:\n"
        "                        continue\n"
        "                    self._transcript.finish_reason = 'eos_token'\n"
        "                    break",
    ),
    Mutant(
        "a stop string is tested before the end id",
        "engine/transcript.py",
        """if token_id in self._end_ids:
            self.finish_reason = "eos_token"
        elif stopped:
            self.finish_reason = "stop_string\"""",
        """if stopped:
            self.finish_reason = "stop_string"
        elif token_id in self._end_ids:
            self.finish_reason = "eos_token\"""",
    ),
    Mutant(
        "a plain reply is never the shown one",
        "record/entries.py",
        "AND (kind != 'plain' OR number = 0)",
        "AND kind != 'plain'",
    ),
    Mutant(
        "of equal ids any are kept",
        "verify/sampling.py",
        "if count == len(values) or (count < len(found) and found[count] < found[count - 1]):",
        "if True:",
    ),
    Mutant(
        "of equal ids the highest are kept",
        "verify/sampling.py",
        "equal = (values == least).nonzero()[: count - len(above), 0]",
        "equal = (values == least).nonzero()[len(above) - count :, 0]",
    ),
    Mutant(
        "batched: of equal ids top-k keeps any",
        "engine/device_rule.py",
        "columns = largest(scaled, settings.top_k)",
        "columns = scaled.flip(-1).topk(settings.top_k).indices.mul(-1).add(width - 1)",
    ),
    Mutant(
        "batched: an id just beyond the embedding is read",
        "drafters/model.py",
        "given >= self.model.readable_ids",
        "given > self.model.readable_ids",
    ),
    Mutant(
        "the rows of an accepted branch are not gathered",
        "engine/loop.py",
        "caches.cache.keep(before, [0, *path])",
        "pass",
    ),
    Mutant(
        "a looked-up token with half its probability",
        "drafters/ngram.py",
        "Distribution(torch.ones(1), torch.tensor([id]))",
        "Distribution(torch.full((1,), 0.5), torch.tensor([id]))",
    ),
    Mutant(
        "early exit leaves its drafts in the target's cache",
        "drafters/early_exit.py",
        "cache.crop(committed)\n        return proposals",
        "return proposals",
    ),
    Mutant(
        "target's cache one too long",
        "engine/reuse.py",
        "self.cache.crop(length)",
        "self.cache.crop(length + 1)",
    ),
    Mutant(
        "target's cache one too short",
        "engine/reuse.py",
        "self.cache.crop(length)",
        "self.cache.crop(length - 1)",
    ),
    Mutant("draft's cache one too long", "engine/reuse.py", "state.crop(length)", "state.crop(length + 1)"),
    Mutant("draft never rolled back", "engine/reuse.py", "state.crop(length)", "pass"),
    Mutant(
        "draft reads only the last id",
        "drafters/model.py",
        "self._readable(sequence[state.length :])",
        "self._readable(sequence[-1:])",
    ),
    Mutant(
        "a kept prefix one id too long",
        "engine/reuse.py",
        "            return index",
        "            return index + 1",
    ),
    Mutant(
        "a kept prefix with drafts that did not stand",
        "engine/reuse.py",
        "kept.crop(shared[best])",
        "kept.crop(shared[best] + 1)",
    ),
    Mutant(
        "a copied prefix of another length",
        "engine/reuse.py",
        "self.cache.fork(length)",
        "self.cache.fork(length - 1)",
    ),
    Mutant(
        "the penalty looks one id ahead",
        "engine/rounds.py",
        "index = row - 1 if row else None",
        "index = row if row < len(proposals) else row - 1 if row else None",
    ),
    Mutant(
        "the penalty does not see the drafts",
        "engine/rounds.py",
        "return ids + path[::-1]",
        "return ids",
    ),
    Mutant(
        "the draft has no penalty",
        "verify/tree.py",
        "distributions(row, settings, sequence, head_ids)",
        "distributions(row, settings, (), head_ids)",
    ),
    Mutant(
        "min-p forgotten where the head is whole",
        "verify/sampling.py",
        "if min_p > 0:",
        "if min_p > 0 and ids is not None:",
    ),
    Mutant(
        "a round that is played again takes other draws",
        "engine/rounds.py",
        "begin(again=self._broken_off)",
        "begin(again=False)",
    ),
    Mutant(
        "a round that is played again reads on from where it broke off",
        "engine/loop.py",
        "self._caches.crop(len(self._transcript.ids) - 1)",
        "pass",
    ),
    Mutant(
        "a part of a round is committed before memory ends in judging the rest",
        "engine/rounds.py",
        "verdicts = _made(self._verdicts(list(ids), proposals, rows, tree))",
        "verdicts = self._verdicts(list(ids), proposals, rows, tree)",
    ),
    Mutant(
        "a drafter learns of a round before it is judged",
        "engine/rounds.py",
        "        verdicts = _made(self._verdicts(list(ids), proposals, rows, tree))\n",
        "        if count:\n            drafter.observe(block, rows, state)\n"
        "        verdicts = _made(self._verdicts(list(ids), proposals, rows, tree))\n",
    ),
    Mutant(
        "a tree's rows are brought together part by part",
        "models/kv_cache.py",
        "[torch.cat([part[:, :, places] for places in found], 2) for part in self.parts]",
        "(torch.cat([part[:, :, places] for places in found], 2) for part in self.parts)",
    ),
    Mutant(
        "an accepted end does not end",
        "engine/loop.py",
        "if self._transcript.finish_reason:\n                    break",
        "if False:\n                    break",
    ),
    Mutant(
        "one token too many",
        "engine/loop.py",
        "self._settings.max_new_tokens - self._transcript.emitted - 1",
        "self._settings.max_new_tokens - self._transcript.emitted",
    ),
    Mutant(
        "rows see the rows after them",
        "models/decoder.py",
        "unseen.triu_(start + 1)",
        "unseen.triu_(start + 2)",
    ),
    Mutant(
        "positions shifted after a rollback",
        "models/decoder.py",
        "rotation = self.rotations[start:end]",
        "rotation = self.rotations[start + (rows > 1) : end + (rows > 1)]",
    ),
    Mutant("batched: accept if u·q ≤ p", "engine/device_rule.py", "(u * q_x < p_x)", "(u * q_x <= p_x)"),
    Mutant(
        "batched: accept greedily: u < p, whatever q", "engine/device_rule.py", "(u * q_x < p_x)", "(u < p_x)"
    ),
    Mutant(
        "batched: a draft counts after one that failed",
        "engine/device_rule.py",
        "(inside & (u * q_x < p_x)).long().cumprod(0).sum()",
        "(inside & (u * q_x < p_x)).long().sum()",
    ),
    Mutant("batched: residual |p - q|", "engine/device_rule.py", "- row_q).clamp_min_(0)", "- row_q).abs_()"),
    Mutant(
        "batched: residual without its weight",
        "engine/device_rule.py",
        "torch.where(rejected, weight, one)",
        "one",
    ),
    Mutant(
        "batched: a zero residual draws nothing sensible",
        "engine/device_rule.py",
        "torch.where(left.sum() > 0, left, row_p)",
        "left",
    ),
    Mutant(
        "batched: the residual's draw is u again",
        "engine/device_rule.py",
        "draws.gather(0, used[None])",
        "draws.gather(0, (used - 1).clamp_min(0)[None])",
    ),
    Mutant(
        "batched: a draw is used twice",
        "engine/batched.py",
        "self._draws.use(round_.used)",
        "self._draws.use(1)",
    ),
    Mutant(
        "batched: block weights not bounded",
        "engine/device_rule.py",
        "(sums - sums.cummax(0).values.clamp_min(0)).exp()",
        "sums.exp()",
    ),
    Mutant(
        "batched: the penalty does not see the drafts",
        "engine/batched.py",
        "seen.append(seen_behind(seen[-1], nodes[-1]))",
        "seen.append(seen[-1])",
    ),
    Mutant(
        "batched: the penalty forgets what was committed",
        "engine/batched.py",
        "self._seen.index_fill_(0, unmarked.long(), True)",
        "pass",
    ),
    Mutant(
        "batched: top-p keeps one id too many",
        "engine/device_rule.py",
        "dropped = p.cumsum(-1) - p >= settings.top_p",
        "dropped = p.cumsum(-1) - p > settings.top_p + p[:, :1]",
    ),
    Mutant(
        "batched: a bad draft row is drafted from",
        "engine/batched.py",
        "drafts.usable.long().cumprod(0).sum()",
        "torch.ones_like(drafts.usable).long().sum()",
    ),
    Mutant(
        "card: a tensor made on the CPU",
        "drafters/eagle.py",
        "torch.ones(target.shape.hidden, device=target.device)",
        "torch.ones(target.shape.hidden)",
    ),
    Mutant("card: a dtype forced", "models/linear/products.py", "x.to(self.dtype)", "x.bfloat16()"),
    Mutant(
        "card: a copy too many",
        "engine/batched.py",
        "sent = self._send([number",
        "self._send([0.0])\n        sent = self._send([number",
    ),
    Mutant(
        "card: a wait too many",
        "engine/batched.py",
        'clock.mark("scored")',
        'clock.mark("scored")\n        raw.amax().item()',
    ),
    Mutant(
        "batched: EAGLE keeps what it read of its drafts",
        "drafters/eagle.py",
        "finally:\n            state.crop(len(ids))",
        "finally:\n            pass",
    ),
    Mutant(
        "batched: early exit's keys stay in the cache",
        "drafters/early_exit.py",
        "finally:\n            cache.crop(committed)",
        "finally:\n            pass",
    ),
    Mutant(
        "card: EAGLE's step waits",
        "drafters/eagle.py",
        "return self._model.head(made).float()",
        "return self._model.head(made).float() + 0 * made.amax().item()",
    ),
    Mutant(
        "card: Medusa's rows go over the host",
        "drafters/medusa.py",
        "return self._score(torch.cat(projected)).float()",
        "return (rows := self._score(torch.cat(projected)).float()).cpu().to(rows.device)",
    ),
    Mutant(
        "card: early exit's rows go over the host",
        "drafters/early_exit.py",
        "layers=self.layers)).float()",
        "layers=self.layers)).float().cpu().to(given.device)",
    ),
    Mutant(
        "card: a trimmed head's ids stay with the host",
        "engine/batched.py",
        "None if head is None else head.to(self._device)",
        "head",
    ),
]


def run(folder: Path, tests: list[str]) -> bool:
    """Whether ``tests`` pass against the ``core`` in ``folder``."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True).returncode == 0


def verdict(mutant: Mutant, folder: Path) -> str:
    file = folder / "core" / mutant.file
    source = file.read_text()
    if source.count(mutant.before) != 1:
        return "does not apply"
    file.write_text(source.replace(mutant.before, mutant.after))
    try:
        if not run(folder, EXACTNESS):
            return "killed by the exactness suite"
        return "SURVIVED" if run(folder, TESTS) else "killed by unit tests"
    finally:
        file.write_text(source)


def main(names: list[str]) -> int:
    chosen = [m for m in MUTANTS if not names or m.name in names]
    bad = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for part in ("core", "tests", "data", "docs", "assets/draft", "pyproject.toml"):
            source = ROOT / part
            ignore = shutil.ignore_patterns("__pycache__", "*.db*")
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, folder / part, **({"ignore": ignore} if source.is_dir() else {}))
        if not run(folder, [*EXACTNESS, *TESTS]):
            print("The unchanged sources fail their tests; mend that first.", file=sys.stderr)
            return 1
        for mutant in chosen:
            start = time.perf_counter()
            result = verdict(mutant, folder)
            bad += result in ("SURVIVED", "does not apply")
            print(f"{mutant.name:<52} {result:<32} {time.perf_counter() - start:4.0f} s", flush=True)
    print(f"{len(chosen)} mutants, {len(chosen) - bad} killed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
