"""Lightning's own Trainer: epochs, checkpoints in the middle and at the end, figures in the logger, one process and two."""

import warnings
from typing import ClassVar

import pytest
import torch
from frameworks import SIZE, Noted, first_coreset, network, settings, two_processes
from torch import nn
from torch.utils.data import DataLoader

L = pytest.importorskip("lightning")
pytestmark = pytest.mark.integration

from coreset_sampler.integrations.lightning import CoresetCallback  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402

from coreset_sampler import CoresetSampler  # noqa: E402


class Indexed(Noted):
    """Digits with their index, which comes through workers too."""

    def __getitem__(self, index):
        return (*super().__getitem__(index), int(index))


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.seen = network(), []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _):
        self.seen.append(batch[2].tolist())
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(folder, cls=CoresetSampler, *, resume=None, devices=1, workers=0, callback=True, every=None, **more):
    module, data = Digits(), Indexed()
    sampler = cls(data, module, **settings(**more))
    saved = ModelCheckpoint(
        folder, every_n_train_steps=every or (3 if devices == 1 else 1), save_top_k=-1, filename="{step}"
    )
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", log_every_n_steps=1,
        enable_progress_bar=False, enable_model_summary=False, logger=CSVLogger(folder), default_root_dir=folder,
        callbacks=[saved, *([CoresetCallback(sampler)] if callback else [])],
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(data, batch_size=9, sampler=sampler, num_workers=workers), ckpt_path=resume)
    return module, sampler


def test_one_process_trains_on_the_coreset_that_a_plain_loop_would_select_and_logs(tmp_path):
    module, sampler = fit(tmp_path, reselect_every=2)
    flat = [i for batch in module.seen for i in batch]
    assert len(flat) == 3 * SIZE
    assert set(flat[:SIZE]) | set(flat[SIZE : 2 * SIZE]) <= set(first_coreset())
    assert set(flat[2 * SIZE :]) <= set(sampler.coreset.indices.tolist()) != set(first_coreset())
    assert sampler.stats["selections"] == 2
    logged = next(tmp_path.rglob("metrics.csv")).read_text()
    assert "coreset/selections" in logged
    assert "coreset/covering_cost" in logged


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_from_the_middle_and_the_end_of_an_epoch_is_exact(tmp_path, workers):
    straight, sampler = fit(tmp_path / "a", workers=workers, every=5)
    for done in (5, 10, 15) if workers == 0 else (15,):
        resumed, again = fit(tmp_path / "b", workers=workers, resume=tmp_path / "a" / f"step={done}.ckpt")
        assert resumed.seen == straight.seen[done:]
        assert again.stats["selections"] == sampler.stats["selections"] == 3
        for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(one, other)


def test_a_callback_for_another_sampler_than_the_loader_s_is_refused(tmp_path):
    module, data = Digits(), Indexed()
    stray, used = (CoresetSampler(data, module, **settings()) for _ in range(2))
    quiet = dict(enable_progress_bar=False, enable_model_summary=False, logger=False, enable_checkpointing=False)
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", callbacks=[CoresetCallback(stray)], **quiet)
    with pytest.raises(ValueError, match="Pass the same object"):
        trainer.fit(module, DataLoader(data, batch_size=9, sampler=used))
    with pytest.raises(TypeError, match="CoresetSampler"):
        CoresetCallback(DataLoader(data))


class Small(L.LightningModule):
    """Notes at each forward of a selection its precision, on the class: a selection leaves no trace on the module."""

    noted: ClassVar[list] = []

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.LayerNorm(16), nn.Linear(16, 10))

    def forward(self, x):
        if not self.training:
            self.noted.append((x.dtype, torch.is_autocast_enabled("cpu")))
        return self.net(x)

    def training_step(self, batch, _):
        batch = batch["coreset"] if isinstance(batch, dict) else batch
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit_small(loaders=lambda loader: loader, workers=0, **options):
    module, data = Small(), Noted()
    Small.noted.clear()
    sampler = CoresetSampler(data, module, **settings())
    quiet = dict(enable_progress_bar=False, enable_model_summary=False, logger=False, enable_checkpointing=False)
    trainer = L.Trainer(**dict(max_epochs=1, accelerator="cpu", callbacks=[CoresetCallback(sampler)]) | quiet | options)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, loaders(DataLoader(data, batch_size=9, sampler=sampler, num_workers=workers)))
    finally:
        assert sampler.forward_fn is None  # as it was
    return module, sampler


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("precision", "dtype", "autocast"),
    [
        ("bf16-true", torch.bfloat16, False),
        ("16-true", torch.float16, False),
        ("64-true", torch.float64, False),
        ("bf16-mixed", torch.float32, True),
    ],
)
def test_selection_runs_in_the_precision_of_training(precision, dtype, autocast, workers):
    default = torch.get_default_dtype()
    module, sampler = fit_small(precision=precision, workers=workers)
    assert set(module.noted) == {(dtype, autocast)}
    assert sampler.stats["selections"] == 1
    assert torch.get_default_dtype() is default


def test_loaders_that_would_begin_the_sampler_several_times_an_epoch_are_refused():
    def beside(mode):
        others = DataLoader(torch.arange(300.0), batch_size=10)
        return lambda loader: L.pytorch.utilities.CombinedLoader({"coreset": loader, "others": others}, mode)

    with pytest.raises(ValueError, match="min_size"):
        fit_small(beside("max_size_cycle"))
    with pytest.raises(ValueError, match="min_size"):
        fit_small(beside("max_size"))
    _, sampler = fit_small(beside("min_size"), max_epochs=3)
    assert sampler.stats["selections"] == 3


def test_overfit_batches_is_refused_by_name():
    with pytest.raises(ValueError, match="overfit_batches=2"):
        fit_small(overfit_batches=2)


def test_two_processes_agree_share_out_once_and_resume_exactly():
    ranks = [rank["lightning"] for rank in two_processes()]
    for name in ("straight", "shared_out"):
        first, second = (rank[name] for rank in ranks)
        assert first["coreset"] == second["coreset"]
        assert first["selections"] == second["selections"] == 3
        for epoch in range(3):
            own, other = ([i for b in rank["seen"][5 * epoch : 5 * epoch + 5] for i in b] for rank in (first, second))
            assert len(own) == len(other) == SIZE // 2
            assert len({*own, *other}) > 0.6 * SIZE
        assert {i for b in first["seen"][10:] for i in b} <= set(first["coreset"])
        start = {i for rank in (first, second) for b in rank["seen"][:5] for i in b}
        assert len(start & set(first_coreset())) > 0.95 * len(start)
    for rank in ranks:
        assert rank["3"]["seen"] == rank["straight"]["seen"][3:]
        assert rank["5"]["seen"] == rank["straight"]["seen"][5:]
        assert rank["end"]["seen"] == rank["shared_out"]["seen"][5:]
        assert "Use DistributedCoresetSampler" in rank["middle"]
