"""torchdata's StatefulDataLoader: it keeps the position itself, with and without workers, also under accelerate."""

import pytest
from frameworks import SIZE, Noted, first_coreset, network, settings
from torch.utils.data import BatchSampler, DataLoader

stateful = pytest.importorskip("torchdata.stateful_dataloader")
torchdata_sampler = pytest.importorskip("torchdata.stateful_dataloader.sampler")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore::UserWarning")]

from coreset_sampler import CoresetSampler, DistributedCoresetSampler  # noqa: E402


class Indexed(Noted):
    def __getitem__(self, index):
        return int(index), super().__getitem__(index)[1]


def loader_of(cls=CoresetSampler, workers=0, **more):
    data = Indexed()
    sampler = cls(data, network(), **settings(selection_dataset=Noted(), **more))
    return sampler, stateful.StatefulDataLoader(data, batch_size=9, sampler=sampler, num_workers=workers)


def seen(loader, batches=None):
    found = []
    for index, _ in loader:
        found.append(index.tolist())
        if len(found) == batches:
            break
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [3, 10])
def test_resume_is_exact_and_needs_no_position(workers, stop):
    straight, all_of_it = loader_of(workers=workers)
    epochs = [seen(all_of_it) for _ in range(3)]
    assert {i for batch in epochs[0] for i in batch} <= set(first_coreset())
    _, interrupted = loader_of(workers=workers)
    seen(interrupted)
    seen(interrupted, stop)
    state = interrupted.state_dict()
    sampler, resumed = loader_of(workers=workers)
    resumed.load_state_dict(state)
    rest = seen(resumed)
    if stop < 10:
        assert rest == epochs[1][stop:]
        rest = seen(resumed)
    else:
        rest = rest or seen(resumed)
    assert rest == epochs[2]
    assert sampler.stats["selections"] == straight.stats["selections"] == 3


def test_each_process_s_share_resumes_too():
    for rank in range(2):
        _, straight = loader_of(DistributedCoresetSampler, num_replicas=2, rank=rank)
        whole = seen(straight)
        assert sum(map(len, whole)) == SIZE // 2
        _, interrupted = loader_of(DistributedCoresetSampler, num_replicas=2, rank=rank)
        seen(interrupted, 2)
        _, resumed = loader_of(DistributedCoresetSampler, num_replicas=2, rank=rank)
        resumed.load_state_dict(interrupted.state_dict())
        assert seen(resumed) == whole[2:]


def test_a_plain_data_loader_with_workers_is_ahead_so_the_position_is_told():
    """The trap that StatefulDataLoader spares one: workers have drawn indices that the loop has not seen."""
    sampler, _ = loader_of()
    loader = DataLoader(sampler.dataset, batch_size=9, sampler=sampler, num_workers=2)
    batches = iter(loader)
    done = [next(batches)[0].tolist() for _ in range(2)]
    assert sampler.state_dict()["position"] > 18
    again, _ = loader_of()
    again.load_state_dict(sampler.state_dict(position=18))
    rest = seen(DataLoader(again.dataset, batch_size=9, sampler=again))
    assert [i for batch in done + rest for i in batch] == list(CoresetSampler(Noted(), network(), **settings()))
    del batches


def test_accelerate_with_stateful_loaders_resumes_by_itself(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    from accelerate.utils import DataLoaderConfiguration

    def prepared():
        config = DataLoaderConfiguration(use_stateful_dataloader=True)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config)
        sampler, _ = loader_of()
        loader = accelerator.prepare(DataLoader(sampler.dataset, batch_size=9, sampler=sampler))
        accelerator.register_for_checkpointing(sampler)
        return accelerator, loader

    accelerator, loader = prepared()
    whole = seen(loader)
    accelerator, loader = prepared()
    for i, _ in enumerate(loader):
        if i == 3:
            accelerator.save_state(tmp_path / "state")
            break
    accelerator, loader = prepared()
    accelerator.load_state(tmp_path / "state")
    assert seen(loader) == whole[4:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_sampler_without_a_state_is_refused_and_torchdata_s_own_resumes(workers):
    def loader(cls):
        sampler, _ = loader_of()
        batches = cls(sampler, batch_size=8, drop_last=False)
        return stateful.StatefulDataLoader(sampler.dataset, batch_sampler=batches, num_workers=workers)

    with pytest.raises(TypeError, match=r"Pass sampler= and batch_size= to StatefulDataLoader"):
        seen(loader(BatchSampler))
    own = torchdata_sampler.BatchSampler
    straight, interrupted, resumed = loader(own), loader(own), loader(own)
    epochs = [seen(straight), seen(straight)]
    seen(interrupted), seen(interrupted, 2)
    resumed.load_state_dict(interrupted.state_dict())
    assert seen(resumed) == epochs[1][2:]
    sampler = interrupted.batch_sampler.sampler
    assert sum(map(len, seen(DataLoader(sampler.dataset, batch_sampler=BatchSampler(sampler, 8, False))))) == SIZE
