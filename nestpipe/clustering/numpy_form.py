"""The algorithm of clustering.c in numpy, move by move: its reference, and its replacement without a compiler."""

from __future__ import annotations

import numpy as np

from nestpipe.data.dataset import flat_ranges


class Parts:
    """Samples on their way into parts.

    Only keys that two or more samples hold count: the others cost the same wherever their sample goes.

    * ``samples_of_keys``: int64 [pins], the samples of key 0, then those of key 1, ...; key k has ``degree[k]`` of them
      from ``key_start[k]`` on.
    * ``keys_of``: for each sample the keys that it holds.
    * ``part``: int32 [samples], the part of each sample, -1 while it has none.
    * ``holders``: int64 [keys, parts], how many samples of a part hold a key.
    * ``near``: int64 [samples, parts], how many keys of a sample are held by *other* samples of a part.
    """

    def __init__(self, keys: np.ndarray, offsets: np.ndarray, parts: int) -> None:
        samples = offsets.shape[1] - 1
        holder = np.concatenate([np.repeat(np.arange(samples), np.diff(row)) for row in offsets])
        pins = np.unique(np.stack([keys, holder]), axis=1)  # by key, then sample; a key twice in a sample counts once
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
        """The better of growing with ``weights[0]`` and, if a key has ``dense`` samples or more, ``weights[1:]``."""
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
        """The samples that hold each of ``keys``, back to back."""
        return self.samples_of_keys[flat_ranges(self.key_start[keys], self.degree[keys])]

    def _grow(self, sizes: np.ndarray, weights: np.ndarray) -> None:
        """Fill one part after the other, each time with the sample that has most in common with the part."""
        shared_keys = np.array([len(keys) for keys in self.keys_of])
        for part, size in enumerate(sizes):
            in_common = np.zeros(len(self.part), dtype=np.int64)  # weights of the keys that a sample shares with it
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
            self.near[sample, own] -= (holders[:, own] == 1).sum()  # keys that nobody else holds there

    def _exchange(self, tries: int) -> int:
        """One pass over the samples: each changes places with the best partner, if that saves keys. How many did."""
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
        """The sample of another part whose exchange with ``sample`` saves most keys; None if no exchange saves any.

        ``near`` bounds what an exchange saves; the ``tries`` most promising partners are counted exactly, which
        matters for keys that both hold.
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
        """``others``: for each key of ``sample``, how many other samples of ``part`` hold it.

        With no other holder, all samples with the key notice; with one, only that one does, for which ``sample`` is
        the only other holder.
        """
        keys = self.keys_of[sample]
        unheld = self._holders_of(keys[others == 0])
        np.add.at(self.near, (unheld[unheld != sample], part), by)
        held_once = self._holders_of(keys[others == 1])
        holder = held_once[(held_once != sample) & (self.part[held_once] == part)]
        np.add.at(self.near, (holder, part), by)
