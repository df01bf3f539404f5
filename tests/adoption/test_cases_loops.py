"""Loops as people write them: epochs, other iterators, evaluation, errors, ends. Against plain loops."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

pytest.importorskip("torchrec")


from tests.support.adoption_cases import ROWS, Clicks, Scores, bags, clicks, keyed, rank
from tests.support.adoption_loops import pipeline_of, sized, to_the_end


def test_epochs_by_the_length_of_the_loader():
    loader = sized(4, 5, 6, 7)
    pipeline, trained = pipeline_of(), []
    for _ in range(3):
        batches = iter(loader)
        trained.append([pipeline.progress(batches).samples for _ in range(len(loader))])
    pipeline.close()
    assert trained == [[4, 5, 6, 7]] * 3


def test_epochs_to_their_end():
    pipeline = pipeline_of()
    assert [to_the_end(pipeline, iter(sized(4, 5))) for _ in range(3)] == [[4, 5]] * 3
    ended = iter(sized(4))
    assert to_the_end(pipeline, ended) == [4] and to_the_end(pipeline, ended) == []
    pipeline.close()


def test_no_batch_is_lost_or_trained_twice_when_iterators_take_turns():
    """Three steps on one, all of another, the rest of the first, and the other again, which has ended."""
    one, other, pipeline = iter(sized(*range(10, 16))), iter(sized(20, 21)), pipeline_of()
    trained = []
    for batches, most in ((one, 3), (other, 99), (one, 99), (other, 99)):
        trained += to_the_end(pipeline, batches, most)
    pipeline.close()
    assert sorted(trained) == [10, 11, 12, 13, 14, 15, 20, 21]


def switched() -> tuple[list[int], list[int]]:
    """Another iterator after two steps, and then, on one rank, slowly read batches."""

    def slow(batches):
        for batch in batches:
            time.sleep(0.05 * (rank() == 0))
            yield batch

    pipeline = pipeline_of()
    first = slow(sized(*range(10, 20)))
    begun = [pipeline.progress(first).samples for _ in range(2)]
    rest = to_the_end(pipeline, slow(sized(*range(30, 33))))
    pipeline.close()
    return begun, rest


def test_ranks_change_to_another_iterator_at_one_step(pool2):
    (begun, rest), other = pool2.run(switched)
    assert (begun, rest) == other and begun == [10, 11]
    assert rest[-3:] == [30, 31, 32] and rest[:-3] == list(range(12, 20))[: len(rest) - 3]


class Rows(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, n):
        return n


def collated(numbers):
    generator = torch.Generator().manual_seed(sum(numbers))
    n = len(numbers)
    return Clicks(
        keyed(n, generator), torch.randn(n, 3, generator=generator), torch.rand(n, generator=generator).round()
    )


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_data_loader_over_epochs(workers):
    loader = DataLoader(Rows(), batch_size=10, shuffle=True, collate_fn=collated, num_workers=workers)
    pipeline = pipeline_of()
    assert [sorted(to_the_end(pipeline, iter(loader))) for _ in range(2)] == [[4, 10, 10]] * 2
    pipeline.close()


def test_evaluation_mode_never_trains_and_takes_no_batch():
    pipeline, batches = pipeline_of(), iter(sized(4, 5, 6))
    pipeline.progress(batches)
    weights = copy.deepcopy(dict(pipeline.export().state_dict()))
    pipeline._model.eval()
    with pytest.raises(RuntimeError, match=r"eval mode.*export"):
        pipeline.progress(batches)
    pipeline._model.train()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"no_grad.*export"):
        pipeline.progress(batches)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="export"):
        pipeline.progress(batches)
    assert all(torch.equal(value, weights[name]) for name, value in pipeline.export().state_dict().items())
    assert to_the_end(pipeline, batches) == [5, 6]
    pipeline.close()


def test_evaluation_of_a_copy_does_not_disturb_training():
    def run(evaluate):
        pipeline, batches, losses = pipeline_of(), iter(clicks(steps=5)()), []
        for _ in range(5):
            losses.append(pipeline.progress(batches).loss)
            if evaluate:
                with torch.no_grad():
                    model = pipeline.export().eval()
                    assert all(float(model(batch)[0]) > 0 for batch in sized(4, 5))
        pipeline.close()
        return losses

    assert run(True) == run(False)


def with_random_numbers() -> list[float]:
    """Dropout, and a loader that draws from torch's generator on another thread."""

    def drawn():
        for batch in clicks(steps=6)():
            batch.label = batch.label * torch.rand(len(batch.label))
            yield batch

    torch.manual_seed(7)
    pipeline, batches = pipeline_of(Scores(bags(), middle=nn.Dropout(0.3))), drawn()
    losses = [pipeline.progress(batches).loss for _ in range(6)]
    pipeline.close()
    return losses


def test_the_same_seed_gives_the_same_losses():
    assert len({tuple(with_random_numbers()) for _ in range(4)}) == 1


def test_outputs_are_in_the_order_of_the_batch_also_with_clustering():
    class Named(Scores):
        def forward(self, batch):
            loss, score = super().forward(batch)
            return loss, {"dense": batch.dense, "more": (score, batch.label)}

    pipeline = pipeline_of(Named(), clustering=True)
    for batch in clicks(samples=20)():
        again = Clicks(*(getattr(batch, name) for name in ("sparse", "dense", "label")))
        pipeline.progress(iter([batch]))
        assert torch.equal(pipeline.output["dense"], again.dense)
        assert torch.equal(torch.cat([piece["more"][1] for piece in pipeline.outputs]), again.label)
        assert pipeline.output["more"][0].grad_fn is None
        break
    pipeline.close()


def test_detach_gives_the_model_back_usable():
    pipeline, batches = pipeline_of(), iter(clicks()())
    keys = set(pipeline._model.state_dict())
    to_the_end(pipeline, batches)
    trained = pipeline.export().state_dict()
    model = pipeline.detach()
    assert set(model.state_dict()) == keys
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())
    loss = model(sized(4)[0])[0]
    loss.backward()
    assert model.ebc.embedding_bags["t_a"].weight.grad.shape == (ROWS, 4)
    again = pipeline_of(model)
    assert to_the_end(again, iter(sized(4, 5))) == [4, 5]
    again.close()
    with pytest.raises(RuntimeError, match="detach"):
        pipeline.progress(batches)
