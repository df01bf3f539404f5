"""The algorithm of clustering.c in numpy, move by move: its reference, and its replacement if there is no compiler."""

from __future__ import annotations

import numpy as np

from nestpipe.data.dataset import flat_ranges


class Parts:
    """The state of a partition of samples into parts.

    Only keys of two or more samples count. The others cost the same in every part.

    * ``samples_of_keys``: int64 [pins], the samples of key 0, then those of key 1, ... Key k has ``degree[k]`` of them,
      starting at ``key_start[k]``.
    * ``keys_of``: for each sample, its keys.
    * ``part``: int32 [samples], the part of each sample, or -1 while it has no part.
    * ``holders``: int64 [keys, parts], how many samples of a part have a key.
    * ``near``: int64 [samples, parts], how many keys of a sample *other* samples of a part have as well.
    """

    def __init__(self, keys: np.ndarray, offsets: np.ndarray, parts: int) -> None:
        samples = offsets.shape[1] - 1
        holder = np.concatenate([np.repeat(np.arange(samples), np.diff(row)) for row in offsets])
        pins = np.unique(np.stack([keys, holder]), axis=1)  # by key, then sample; a key counts once per sample
        _, number, degree = np.unique(pins[0], return_inverse=True, return_counts=True)
        shared = degree[number] > 1
        _, number = np.unique(number[shared], return_inverse=True)
        self.samples_of_keys = pins[1][shared]
        self.degree = np.bincount(number)
        self.key_start = np.cumsum(self.degree) - self.degree
        by_sample = np.argsort(self.samples_of_keys, kind="stable")
        ends = np.cumsum(np.bincount(self.samples_of_keys, minlength=samples))
        self.keys_of = np.split(number[by_sample], ends[:-1])
        self.part = np.full(samples, -1, dtype=np.int32)
        self.holders = np.zeros((len(self.degree), parts), dtype=np.int64)
        self.near = np.zeros((samples, parts), dtype=np.int64)

    def best(self, sizes: np.ndarray, weights: np.ndarray, passes: int, tries: int, dense: int) -> np.ndarray:
        """The best result of growth with ``weights[0]`` only, or with each row of ``weights`` if the keys are dense.

        They are if a key has ``dense`` samples or more on average.
        """
        is_dense = len(self.samples_of_keys) >= dense * len(self.degree)
        best, fewest = self.part, np.inf
        for weights_of_degree in weights if is_dense else weights[:1]:
            self.part = np.full_like(self.part, -1)
            self.holders[:] = 0
            self.near[:] = 0
            self._grow(sizes, weights_of_degree)
            for _ in range(passes):
                if not self._exchange(tries):
                    break
            found = int((self.holders > 0).sum())
            if found < fewest:
                best, fewest = self.part, found
        return best

    def _holders_of(self, keys: np.ndarray) -> np.ndarray:
        """The samples that have each of ``keys``, back to back."""
        return self.samples_of_keys[flat_ranges(self.key_start[keys], self.degree[keys])]

    def _grow(self, sizes: np.ndarray, weights: np.ndarray) -> None:
        """Fill one part after the other, each time with the sample that has the most in common with the part."""
        shared_keys = np.array([len(keys) for keys in self.keys_of])
        for part, size in enumerate(sizes):
            in_common = np.zeros(len(self.part), dtype=np.int64)  # weights of a sample's keys that the part has too
            for taken in range(size):
                score = np.where(self.part < 0, in_common if taken else shared_keys, -1)
                sample = int(score.argmax())
                self.part[sample] = part
                keys = self.keys_of[sample]
                new = keys[self.holders[keys, part] == 0]
                self.holders[keys, part] += 1
                np.add.at(in_common, self._holders_of(new), np.repeat(weights[self.degree[new]], self.degree[new]))
        for sample, keys in enumerate(self.keys_of):
            holders, own = self.holders[keys], self.part[sample]
            self.near[sample] = (holders > 0).sum(0)
            self.near[sample, own] -= (holders[:, own] == 1).sum()  # keys that no other sample of its part has

    def _exchange(self, tries: int) -> int:
        """Swap each sample once with its best partner, if that saves keys. Returns the number of swaps."""
        exchanges = 0
        for sample in range(len(self.part)):
            partner = self._partner(sample, tries)
            if partner is None:
                continue
            a, b = int(self.part[sample]), int(self.part[partner])
            self._leave(sample, a)
            self._leave(partner, b)
            self._enter(sample, b)
            self._enter(partner, a)
            exchanges += 1
        return exchanges

    def _partner(self, sample: int, tries: int) -> int | None:
        """The sample of another part whose swap with ``sample`` saves the most keys; None if no swap saves any.

        ``near`` bounds what a swap saves. The ``tries`` most promising partners are counted exactly, which matters
        for keys that both samples have.
        """
        everyone = np.arange(len(self.part))
        own = self.part[sample]
        bound = self.near[sample, self.part] - self.near[sample, own]
        bound += self.near[:, own] - self.near[everyone, self.part]
        bound[self.part == own] = 0
        best, most = None, 0
        for other in np.argsort(-bound, kind="stable")[:tries]:
            if bound[other] <= most:
                break
            both = self.holders[np.intersect1d(self.keys_of[sample], self.keys_of[other])]
            saved = bound[other] - (both[:, own] < 2).sum() - (both[:, self.part[other]] < 2).sum()
            if saved > most:
                best, most = int(other), saved
        return best

    def _leave(self, sample: int, part: int) -> None:
        self.part[sample] = -1
        keys = self.keys_of[sample]
        self.holders[keys, part] -= 1
        self._update_near(sample, part, self.holders[keys, part], -1)

    def _enter(self, sample: int, part: int) -> None:
        keys = self.keys_of[sample]
        self._update_near(sample, part, self.holders[keys, part], +1)
        self.holders[keys, part] += 1
        self.part[sample] = part

    def _update_near(self, sample: int, part: int, others: np.ndarray, by: int) -> None:
        """Update ``near`` after ``sample`` enters (``by`` = 1) or leaves (-1) ``part``.

        ``others``: for each key of ``sample``, how many other samples of ``part`` have it. If there is no other one,
        ``near`` changes for all samples with the key. If there is exactly one, it changes only for that one.
        """
        keys = self.keys_of[sample]
        unheld = self._holders_of(keys[others == 0])
        np.add.at(self.near, (unheld[unheld != sample], part), by)
        held_once = self._holders_of(keys[others == 1])
        holder = held_once[(held_once != sample) & (self.part[held_once] == part)]
        np.add.at(self.near, (holder, part), by)
