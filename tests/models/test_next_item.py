"""The training task: the loss by hand, empty batches, seeds, learning, evaluation."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from nestpipe.config import DataConfig, ModelConfig, TrainingConfig
from nestpipe.data import Batch, Jagged
from nestpipe.datasets.loader import load_dataset
from nestpipe.models.next_item import NextItem, build_model_spec
from nestpipe.models.ranking_quality import evaluate
from tests.support.paths import MOVIELENS
from tests.support.plain_loop import PlainEmbeddings, train_plain
from tests.support.popularity import popularity_hit_rate

SMALL = TrainingConfig(
    data=DataConfig(data_scale=1e-5, batch_size=8, negatives=6),
    model=ModelConfig(embedding_dim=16, width=16, sequence_length=10),
)


@pytest.fixture(scope="module")
def dataset():
    return load_dataset(SMALL.data, SMALL.model, SMALL.seed)


@pytest.fixture(scope="module")
def batch(dataset) -> Batch:
    """Samples of many lengths, including an empty history and one with a single item."""
    batch = dataset.make_batch(np.arange(dataset.samples)[:24], epoch=0, global_samples=24)
    history = batch.sparse["history"]
    counts = history.counts.clone()
    counts[3], counts[5] = 0, 1
    cut = torch.cat([history.narrow(i, i + 1).flat[: counts[i]] for i in range(24)])
    times = batch.extra["timestamps"]
    cut_times = torch.cat([times.narrow(i, i + 1).flat[: counts[i]] for i in range(24)])
    short = Jagged(cut, counts)
    return replace(
        batch,
        sparse={**batch.sparse, "history": short},
        extra={**batch.extra, "history_ids": short, "timestamps": Jagged(cut_times, counts)},
    )


def build(training: TrainingConfig, dataset) -> nn.Module:
    spec = build_model_spec(training, dataset)
    return spec.build(PlainEmbeddings(spec.tables, training.seed))


def by_hand(model: nn.Module, sample: Batch) -> torch.Tensor:
    """The loss of one sample that has targets, one target and one negative at a time."""
    table, dense = model.embeddings.tables["item"].weight, model.dense
    ids, times = sample.sparse["history"].flat, sample.extra["timestamps"].flat
    query = dense.encode(table[ids[:-1]][None], times[None, :-1])[0]
    losses = []
    for q, target in zip(query, ids[1:], strict=True):
        rivals = [n for n in sample.extra["negative_ids"][0].tolist() if n != target]
        scores = dense.represent(table[[int(target), *rivals]]) @ q
        losses.append(-scores.log_softmax(0)[0])
    return torch.stack(losses).mean()


def test_loss_by_hand(dataset, batch):
    model = build(SMALL, dataset)
    losses = model(batch)
    assert losses.shape == (24,) and losses.dtype == torch.float32
    for i in (0, 3, 5, 11):
        ids = batch.sparse["history"].narrow(i, i + 1).flat
        if len(ids) < 2:
            assert losses[i] == 0
            continue
        torch.testing.assert_close(losses[i], by_hand(model, batch.narrow(i, i + 1)), rtol=1e-4, atol=1e-5)


def test_accidental_hits_do_not_count(dataset, batch):
    model = build(SMALL, dataset)
    targets = batch.sparse["history"].narrow(0, 1).flat[1:]
    negative_ids = batch.extra["negative_ids"].clone()
    negative_ids[0] = targets[0]  # this target is left without a negative
    clash = replace(
        batch,
        sparse={**batch.sparse, "negatives": Jagged(negative_ids.flatten(), batch.sparse["negatives"].counts)},
        extra={**batch.extra, "negative_ids": negative_ids},
    ).narrow(0, 1)
    losses = model(clash)
    torch.testing.assert_close(losses[0], by_hand(model, clash), rtol=1e-4, atol=1e-5)
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert all(torch.isfinite(p.grad).all() for p in model.dense.parameters())


def test_micro_batches_give_the_losses_and_gradients_of_the_batch(dataset, batch):
    whole, parts = build(SMALL, dataset), build(SMALL, dataset)
    losses = whole(batch)
    losses.sum().backward()
    shuffled = torch.randperm(24, generator=torch.Generator().manual_seed(3))
    pieces = batch.select(shuffled).split(30)  # some are empty
    got = []
    for piece in pieces:
        got.append(parts(piece))
        got[-1].sum().backward()
    torch.testing.assert_close(torch.cat(got), losses[shuffled])
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        x, y = (g.to_dense() if g.is_sparse else g for g in (a.grad, b.grad))
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_no_samples_at_all_and_no_items_at_all(dataset, batch):
    model = build(SMALL, dataset)
    for part in (batch.narrow(0, 0), batch.narrow(3, 4)):
        losses = model(part)
        assert losses.tolist() == [0.0] * len(part)
        losses.sum().backward()
        assert all(p.grad is not None and not p.grad.any() for p in model.dense.parameters())


def test_dense_weights_depend_only_on_the_seed(dataset):
    torch.manual_seed(11)
    first = build(SMALL, dataset).dense.state_dict()
    state = torch.get_rng_state()
    second = build(SMALL, dataset).dense.state_dict()
    assert torch.equal(state, torch.get_rng_state())
    other = build(replace(SMALL, seed=2), dataset).dense.state_dict()
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert not torch.equal(first["backbone.positions"], other["backbone.positions"])


def test_pacing_keeps_the_names_of_the_weights(dataset):
    assert list(build(replace(SMALL, pace_dense_ms=1.0), dataset).dense.state_dict()) == list(
        build(SMALL, dataset).dense.state_dict()
    )


def test_width_other_than_the_embedding_dim(dataset, batch):
    training = replace(SMALL, model=replace(SMALL.model, width=24))
    losses = build(training, dataset)(batch)
    losses.sum().backward()
    assert losses.isfinite().all()


def test_the_model_names_one_table_for_both_features(dataset):
    (table,) = build_model_spec(SMALL, dataset).tables
    assert (table.name, table.rows, table.dim) == ("item", dataset.items, 16)
    assert table.features == ("history", "negatives")


@pytest.mark.parametrize("pace_dense_ms", [0.0, 1.0])
def test_torchrecs_embedding_collection_replaces_the_embeddings(dataset, batch, pace_dense_ms):
    pytest.importorskip("torchrec", reason="torchrec is not installed")
    from torchrec.modules.embedding_configs import EmbeddingConfig
    from torchrec.modules.embedding_modules import EmbeddingCollection

    from nestpipe.data.keyed_jagged import keyed_jagged_tensor

    plain = build(SMALL, dataset)
    spec = build_model_spec(replace(SMALL, pace_dense_ms=pace_dense_ms), dataset)
    (table,) = spec.tables
    collection = EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=table.name,
                num_embeddings=table.rows,
                embedding_dim=table.dim,
                feature_names=list(table.features),
            )
        ]
    )
    weight = collection.embeddings["item"].weight
    with torch.no_grad():
        weight.copy_(plain.embeddings.tables["item"].weight)
    model = spec.build(collection)
    losses, wanted = model(replace(batch, sparse=keyed_jagged_tensor(batch.sparse))), plain(batch)
    torch.testing.assert_close(losses, wanted)
    losses.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(weight.grad, plain.embeddings.tables["item"].weight.grad.to_dense())


class Fixed(nn.Module):
    """A dense part whose scores are the item table's first column."""

    def encode(self, items, timestamps):
        return torch.ones_like(items)

    def represent(self, items):
        return items


def test_ranks_exclude_seen_items_and_break_ties_by_id(dataset):
    given = replace(dataset, items=6, lengths=np.array([2, 1, 0, 1]), test_items=np.array([3, 3, 3, 0]))

    def read(users, starts, counts):
        items = {0: [5, 4], 1: [1], 2: [], 3: [0]}
        flat = [items[u][s : s + c] for u, s, c in zip(users, starts, counts, strict=True)]
        joined = np.array([x for part in flat for x in part], dtype=np.int64)
        return joined, np.zeros_like(joined)

    given = replace(given, read=read)
    # scores by item: 0 and 3 tie at 1; 1, 2 are worse; 4, 5 better. User 3's test item is not new: left out.
    table = torch.tensor([[1.0], [0.0], [0.0], [1.0], [2.0], [3.0]])
    metrics = evaluate(Fixed(), table, given, cutoffs=(1, 2, 4))
    assert metrics["users"] == 3
    # user 0 has seen 4, 5: second, after item 0; user 1: fourth, after 5, 4, 0; user 2, without history: all tie
    assert metrics["HR@1"] == 0 and metrics["HR@2"] == pytest.approx(1 / 3) and metrics["HR@4"] == 1
    assert metrics["NDCG@2"] == pytest.approx(1 / math.log2(3) / 3)


@pytest.mark.parametrize("bad", ["every row", "the test items' rows", "the query"])
def test_a_model_that_has_diverged_ranks_no_test_item_first(dataset, bad):
    dense, table = Fixed(), torch.rand(dataset.items, 1)
    if bad == "the query":
        dense.encode = lambda items, timestamps: torch.full_like(items, math.nan)
    else:
        table[dataset.test_items if bad != "every row" else slice(None)] = math.nan
    metrics = evaluate(dense, table, dataset, cutoffs=(10,))
    assert metrics["users"] > 10 and metrics["HR@10"] == metrics["NDCG@10"] == 0


def test_evaluation_in_pieces_gives_the_same(dataset, monkeypatch):
    model = build(SMALL, dataset)
    table = model.embeddings.tables["item"].weight.detach()
    whole = evaluate(model, table, dataset)
    monkeypatch.setattr("nestpipe.models.ranking_quality.ITEMS_AT_ONCE", 7)
    monkeypatch.setattr("nestpipe.models.ranking_quality.USERS_AT_ONCE", 3)
    assert evaluate(model, table, dataset) == pytest.approx(whole)


def test_evaluation_sees_what_training_predicts(dataset):
    """A user's ranks follow from the training's query at the last position of the training history."""
    dense = NextItem(SMALL.model)
    table = torch.randn(dataset.items, 16, generator=torch.Generator().manual_seed(1))
    represented, ranks = dense.represent(table), []
    with torch.no_grad():
        for user in range(dataset.users):
            seen, times = dataset.read(np.array([user]), np.array([0]), dataset.lengths[[user]])
            test = int(dataset.test_items[user])
            if not len(seen):  # all items tie and rank by id
                ranks.append(1 + test)
            if test in seen or not len(seen):
                continue
            latest, then = torch.from_numpy(seen[-10:]), torch.from_numpy(times[-10:])
            scores = represented @ dense.encode(table[latest][None], then[None])[0, -1]
            scores[seen] = -torch.inf
            ranks.append(1 + int((scores > scores[test]).sum()))
    cutoffs = (1, 3, 10, 50)
    metrics = evaluate(dense, table, dataset, cutoffs)
    assert metrics["users"] == len(ranks) > 10
    for k in cutoffs:
        assert metrics[f"HR@{k}"] == pytest.approx(np.mean([rank <= k for rank in ranks]))


@pytest.mark.slow
def test_learns_synthetic_interests():
    training = TrainingConfig(data=DataConfig(data_scale=3e-4))
    dataset = load_dataset(training.data, training.model, training.seed)
    result = train_plain(training, epochs=3, dataset=dataset)
    assert np.mean(result.losses[-5:]) < 0.5 * np.mean(result.losses[:5])
    assert evaluate(result.model, result.table, dataset)["HR@10"] > 1.5 * popularity_hit_rate(dataset)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_beats_popularity_on_movielens(seed):
    if not MOVIELENS.exists():
        pytest.skip("MovieLens 100K is not here; set NESTPIPE_ML100K to its folder")
    data = DataConfig(dataset="movielens", data_path=str(MOVIELENS), on_bad_row="skip")
    training = TrainingConfig(data=data, seed=seed)
    dataset = load_dataset(data, training.model, seed)
    result = train_plain(training, epochs=6, dataset=dataset)
    assert evaluate(result.model, result.table, dataset)["HR@10"] >= 1.6 * popularity_hit_rate(dataset)
