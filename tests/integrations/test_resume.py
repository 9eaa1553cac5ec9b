"""Resume in every framework: after the interruption the same examples are trained on as without it.

At the middle and at the end of an epoch, with and without workers, with a partial last batch, on one process and two.
"""

import pytest
from frameworks import ray_session, two_processes
from resume_cases import BATCH, EPOCHS, FRAMEWORKS, MIDDLE, SIZE, cases

pytestmark = pytest.mark.integration
NAMES = [framework.__name__ for framework in FRAMEWORKS]
BY_NAME = dict(zip(NAMES, FRAMEWORKS, strict=True))


def check(name, found):
    straight = found.pop("straight")
    per_epoch = len(straight) // EPOCHS
    assert len(straight) == EPOCHS * per_epoch
    assert len({tuple(map(tuple, straight[e * per_epoch : (e + 1) * per_epoch])) for e in range(EPOCHS)}) == EPOCHS
    assert found.keys() & {"late", "middle"}
    assert "last" in found
    for point, seen in found.items():
        done = per_epoch + {"middle": MIDDLE, "late": per_epoch - 1}.get(point, per_epoch)
        assert seen == straight[done:], (name, point)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_one_process_goes_on_with_the_batches_still_to_come(name, workers):
    pytest.importorskip({"plain": "torch", "huggingface": "transformers"}.get(name, name.split("_")[0]))
    found = dict(cases(BY_NAME[name], workers))
    if name != "lightning_limited":
        assert len(found["straight"]) == EPOCHS * -(-SIZE // BATCH)
        assert len(found["straight"][-1]) == SIZE % BATCH  # a partial one
    assert found["straight"] == cases(BY_NAME[name], 0)["straight"]  # workers change nothing
    check(name, found)


# A minute for each; without workers two_processes.py resumes in every run, see test_integration_*.
ON_TWO = pytest.mark.parametrize("workers", [pytest.param(count, marks=pytest.mark.slow) for count in (0, 2)])


@ON_TWO
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_go_on_with_the_batches_still_to_come(name, workers):
    ranks = [rank[name] for rank in two_processes("resume_cases.py", str(workers))]
    for rank in ranks:
        check(name, dict(rank))
    first, second = (rank["straight"] for rank in ranks)
    assert first != second  # each its own share


@ON_TWO
def test_batches_that_accelerate_dispatches_resume_at_the_end_of_an_epoch_and_are_refused_in_the_middle(workers):
    ranks = [rank["accelerate_dispatched"] for rank in two_processes("resume_cases.py", str(workers))]
    for rank in ranks:
        batches = len(rank["straight"]) // EPOCHS
        assert batches == SIZE // (2 * BATCH) + 1
        assert rank["end"] == rank["straight"][2 * batches :]
        for point in ("middle", "late", "last"):
            assert "dispatch_batches=False" in rank[point]
    assert ranks[0]["straight"] != ranks[1]["straight"]


def on_a_worker():
    import torch
    from resume_cases import cases, ray_train

    torch.set_num_threads(1)
    found = [None, None]
    torch.distributed.all_gather_object(found, {workers: cases(ray_train, workers) for workers in (0, 2)})
    return found


@pytest.mark.slow  # Ray takes three quarters of a minute to start and stop
def test_two_workers_of_ray_go_on_with_the_batches_still_to_come():
    pytest.importorskip("ray.train.torch")
    ranks = ray_session(on_a_worker)
    for rank in ranks:
        for workers in (0, 2):
            check("ray", dict(rank[workers]))
    assert ranks[0][0]["straight"] != ranks[1][0]["straight"]
