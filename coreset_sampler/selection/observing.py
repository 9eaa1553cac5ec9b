"""Scores from the training's own forward passes: explicit, by watching the model, or by scoring passes in their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import distributed
from ..randomness import HEAD, mixed_seed
from .arguments import check_columns, check_observed
from .evidence import Evidence
from .forward import remark_on
from .noisy_head import NoisyHead, noise_of
from .observed import Batch, copied, joined
from .scores import ScoreStore
from .watching import Watch, cannot_watch, watched_module

if TYPE_CHECKING:
    from .caller import Caller
    from .sampler import CoresetSampler
    from .scoring import ScoringView

_MOST_PENDING = 2**26  # bytes of logits that wait until it is known that they match
_CHUNK = 4096  # examples of a scoring pass at a time
_EXPLICIT = (
    "Use the explicit way: IndexedDataset(train_set) in the DataLoader, and sampler.observe(index, logits) a step."
)
_UNSEEN = "it was not seen in training mode in two epochs (if it was compiled, pass the compiled model)"


class Observing:
    """The scores of one sampler, and how they come about.

    What the watched model says waits in a list until the pass is over, a selection is due or somebody reads the scores. Of
    several processes each has a list of its own, and they are put together when a selection is due.

    Args:
        sampler: whose model is watched.
        watch: whether to watch; by default if the strategy reads the scores, or the sampler yields the whole data set.
    """

    def __init__(self, sampler: CoresetSampler, watch: bool | None) -> None:
        if watch not in (None, True, False):
            raise ValueError(f"watch must be True, False or None, got {watch!r}")
        self._sampler, self.watch, self._noise = sampler, watch, noise_of(sampler.strategy)
        self.store: ScoreStore | None = None
        self.explicit = False  # whether the loop calls observe itself
        self.told = 0  # how often it did
        self.mixes: Callable[[], bool] = bool  # whether a framework's loader mixes examples in the coming pass
        self.off = ""  # why the model cannot be watched
        self._watch: Watch | None = None
        self._head: NoisyHead | None = None
        self._evidence: Evidence | None = None
        self._pending: list[Batch] = []
        self._bytes = 0
        self._mixed_in = False  # whether rows of this pass are in the store already
        self._ahead = 0.0  # share of a pass that the loader reads before the loop needs it
        self._empty_passes = 0  # in a row, in which the model was never seen
        self._given_out = 0  # indices since the last scoring pass
        self._pass_epoch = 0  # of the pass that is watched
        self._resume = (-1, 0)  # an epoch, and the rows of it that were seen before a resume

    def __getstate__(self) -> dict[str, Any]:
        """A copy, also in another process, has the scores and does not watch: its next pass is another one."""
        return self.__dict__ | {"_watch": None, "_head": None, "_evidence": None}

    @property
    def strategy_reads(self) -> bool:
        """Whether the strategy reads scores."""
        return bool(getattr(self._sampler.strategy, "observes", False))

    @property
    def wanted(self) -> bool:
        """Whether somebody wants the model watched."""
        if self.watch is not None:
            return self.watch
        return self.strategy_reads or self._sampler.size == self._sampler.n

    @property
    def automatic(self) -> bool:
        """Whether the model is watched."""
        return self.wanted and not self.explicit and not self.off and not self.mixes()

    def begin_pass(self, order: list[int], start: int, caller: Caller) -> None:
        """Watches the model from now on.

        Args:
            order: the indices that the sampler gives out in this pass.
            start: where it begins.
            caller: knows what the loader, and a framework, make of them.
        """
        self._given_out += self._sampler.size
        share = caller.share(self._sampler, order, start) if self.automatic else None
        if self.automatic and (reason := cannot_watch(self._sampler.model, self._sampler, share)):
            self._switch_off(reason)
        if not self.automatic:
            return
        labels, epoch, given = self._sampler.read_labels(), self._sampler._epoch, len(order)
        self._evidence = self._evidence or Evidence(labels)
        self._mixed_in, self._ahead = False, caller.ahead
        self._head = NoisyHead(self._sampler.model, *self._noise) if self._noise else None
        skipped = self._resume[1] if self._resume[0] == self._sampler.epoch else 0  # by a framework that resumes
        own, at = (order, start or skipped) if not isinstance(share, list) else (share, 0)
        self._watch = Watch(
            watched_module(self._sampler.model),
            labels,
            torch.tensor(own, dtype=torch.int64),
            at,
            yielded=lambda: count if (count := epoch.yielded) < given else len(own),  # a share may repeat its first
            evidence=self._evidence,
            take=self._take_watched,
            mismatch=self._switch_off,
            loader=caller.loader,
            first=0 if isinstance(share, list) else start,
            also_off=None if self._head is None else self._head.off,
        )
        self._resume, self._pass_epoch = (-1, 0), self._sampler.epoch

    def end_pass(self) -> None:
        """The pass is over, or was left early: judges what it gave and keeps that."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        watch.off()
        epoch, given = self._sampler._epoch, watch.rows - watch.begin
        left = given - watch.matched
        explained = max(self._ahead * given, watch.largest) + watch.largest  # read ahead by a loop that was left early
        if watch.matched == 0:
            self._empty_passes += epoch.ended
            if self._empty_passes > 1:
                self._switch_off(_UNSEEN)
        elif epoch.ended and left > explained:
            self._switch_off(f"it was given {watch.matched} rows in a pass over {given} examples")
        else:
            self._empty_passes = 0
        self._settle()

    def _take_watched(self, order: Tensor, rows: slice, logits: Tensor) -> str | None:
        gradients = None
        if self._head is not None:
            seed = mixed_seed(self._sampler.seed, self._sampler.epoch, HEAD, rows.start)
            gradients = self._head.gradients(logits, self._sampler.read_labels()[order[rows]], seed)
            if gradients is None:
                return "its logits are not the output of its last layer, so that noise in the head has no meaning"
        self._take(Batch(order, logits, self._sampler.epoch, gradients, rows))
        return None

    def _take(self, batch: Batch) -> None:
        self._pending.append(batch)
        self._bytes += batch.logits.nbytes
        if self._bytes > _MOST_PENDING:
            self._settle()

    def _settle(self) -> None:
        """Moves what waits into the store. With several processes that is for `gather` to do."""
        if distributed.world()[1] > 1 or not self._pending:
            return
        self._mixed_in = self._watch is not None
        self._add(self._pending)
        self._pending, self._bytes = [], 0

    def _add(self, batches: list[Batch]) -> None:
        for indices, logits, epoch, gradients, _ in joined(batches):
            self.store = self.store or ScoreStore(self._sampler.read_labels(), logits.shape[1])
            check_columns(logits, self.store.classes)
            self._sampler._warn_once(remark_on(logits, self.store.labels[indices]))
            self.store.observe(indices, logits, epoch, gradients)

    def _switch_off(self, reason: str) -> None:
        """Drops what this pass gave and goes on without watching."""
        if self._mixed_in:
            self.store = None  # what did not match is in it
        self._stop()
        self.off = reason
        if self.strategy_reads or self.watch or self._empty_passes < 2:
            instead = "Scoring passes take over. " if self.strategy_reads else ""
            self._sampler._warn_once(f"the model cannot be watched any longer: {reason}. {instead}{_EXPLICIT}")

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.off()
        self._watch, self._evidence, self._pending, self._bytes, self._mixed_in = None, None, [], 0, False

    def rely_on_observe(self) -> None:
        """An adapter knows which rows are which, and calls `observe`."""
        self._stop()
        self.explicit = True

    def give_up(self, reason: str) -> None:
        """The adapter does not know any more."""
        self.explicit = False
        self._switch_off(reason)

    def observe(self, indices: Any, logits: Any) -> None:
        """See `CoresetSampler.observe`."""
        classes = self._pending[0].logits.shape[1] if self._pending else None
        classes = classes if self.store is None else self.store.classes
        at, rows = check_observed(indices, logits, self._sampler.n, self._sampler.read_labels(), classes)
        if self._noise:
            raise ValueError(
                f"observe is given logits, and noise={self._noise[0]!r} of the strategy's posterior needs the head's input: "
                "leave the calls of observe out, so that the model is watched, or pass Trajectory(noise=None)"
            )
        if not (self.wanted or self.strategy_reads) and distributed.world()[1] > 1:
            raise ValueError("observe in several processes needs watch=True in each, so that they put scores together")
        if not self.explicit:
            self.rely_on_observe()
        self.told += 1
        self._take(Batch(at, copied(rows).cpu(), self._sampler.epoch))

    @property
    def scores(self) -> ScoreStore:
        """See `CoresetSampler.scores`."""
        self._settle()
        if self.store is None:
            why = f"the model cannot be watched: {self.off}" if self.off else "train with the sampler first"
            if not self.wanted and not self.explicit:
                why = "pass watch=True to the sampler"
            raise RuntimeError(f"nothing has been observed yet: {why}. {_EXPLICIT}")
        return self.store

    def gather(self) -> None:
        """Puts what all processes have seen into the store of each. One that cannot watch its model speaks for all."""
        if not (self.wanted or self.strategy_reads) or distributed.world()[1] == 1:
            return self._settle()
        parts = distributed.gather([(self.off, self.explicit, list(joined(self._pending)))])
        off = next((reason for reason, _, _ in parts if reason), "")
        if off and not self.off:
            self._switch_off(off)
        self.explicit = any(explicit for _, explicit, _ in parts)
        for _, _, batches in parts:
            self._add([] if off and not self.explicit else batches)
        self._pending, self._bytes, self._mixed_in = [], 0, self._watch is not None

    def fill(self, view: ScoringView) -> ScoreStore | None:
        """What the strategy is given as `view.scores`; runs a scoring pass over everything where nobody watches."""
        if not self.strategy_reads:
            return None
        if not self.automatic and not self.explicit and (self.store is None or self._given_out >= self._sampler.n):
            self._score(view)
            self._given_out = 0
        return self.store or ScoreStore(view.labels, max(2, view.classes))  # an empty one: nothing was seen yet

    def _score(self, view: ScoringView) -> None:
        chunks = view.shard(list(torch.arange(self._sampler.n).split(_CHUNK)))
        least, seed = torch.finfo(torch.float32).tiny, mixed_seed(self._sampler.seed, self._sampler._epoch.coming, HEAD)
        generator = torch.Generator().manual_seed(seed)
        draws = self._noise[0].draw(view, self._noise[1], generator) if self._noise else [{}]
        found = []
        for at, gradients in zip(chunks, view.gradients(chunks, draws), strict=True):
            probability = gradients.mean(0)
            probability[torch.arange(len(at)), view.labels[at]] += 1
            found.append(Batch(at, probability.clamp(min=least).log(), self._sampler._epoch.coming))
        self._add(view.gather(found))

    def stats(self) -> dict[str, float]:
        """Figures for `CoresetSampler.stats`."""
        self._settle()
        store = self.store
        return {} if store is None else {"coverage": store.coverage, "score_age": store.age(self._sampler.epoch)}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on from. Of several processes only what they have put together already."""
        self._settle()
        return {
            "store": None if self.store is None else self.store.state_dict(),
            "off": self.off,
            "explicit": self.explicit,
            "given_out": self._given_out,
            "epoch": self._pass_epoch if self._watch is not None else self._resume[0],
            "matched": self._watch.position if self._watch is not None else self._resume[1],
        }

    def check_state(self, state: Any) -> ScoreStore | None:
        """The store of a state that can be loaded, or an error. Changes nothing."""
        kinds = {"off": str, "explicit": bool, "given_out": int, "epoch": int, "matched": int}
        good = isinstance(state, Mapping) and state.keys() == {"store", *kinds}
        if not good or not all(type(state[key]) is kind for key, kind in kinds.items()):
            raise ValueError(f"the state of the scores is damaged; it was not made by state_dict(): {state!r:.200}")
        if state["store"] is None:
            return None
        store = ScoreStore(self._sampler.read_labels(), int(state["store"].get("classes", 0)))
        store.load_state_dict(state["store"])
        return store

    def load(self, state: Mapping[str, Any], store: ScoreStore | None, position: int) -> None:
        """Goes on from a state that `check_state` has read.

        Args:
            state: what `state_dict` gave.
            store: what `check_state` gave.
            position: where the sampler goes on; at 0 a framework skips what was seen.
        """
        self._stop()
        self.store, self.off, self.explicit = store, state["off"], state["explicit"]
        self._given_out, self._resume = state["given_out"], (state["epoch"], 0 if position else state["matched"])
        self._empty_passes = 0
