"""A typical trainer: settings from a file, workers, a progress bar, bf16 autocast."""

import argparse
import dataclasses
import json
import logging
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

logger = logging.getLogger(__name__)


@dataclass
class OptimizerConfig:
    name: str = "AdamW"
    lr: float = 1e-2


@dataclass
class Config:
    epochs: int = 2
    batch_size: int = 4
    num_workers: int = 2
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    @classmethod
    def load(cls, path):
        values = json.loads(Path(path).read_text())
        return cls(**{**values, "optimizer": OptimizerConfig(**values.get("optimizer", {}))})


class Squares(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.rand(6, generator=generator)
        return x, x.square().sum(0, keepdim=True)


def progress(iterable, *, total, disable):
    for done, each in enumerate(iterable, start=1):
        yield each
        if not disable:
            sys.stderr.write(f"\r{done}/{total}")
            sys.stderr.flush()
    if not disable:
        sys.stderr.write("\n")


class Stop:
    """Flag that a signal sets; schedulers send one before they end a job."""

    def __init__(self):
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self.ask)

    def ask(self, number, frame):
        self.asked = True


def train_epoch(model, optimizer, loader, stop):
    total = torch.zeros(2)
    for x, y in progress(loader, total=len(loader), disable=dist.get_rank() != 0):
        if stop.asked:
            break
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += torch.tensor([loss.item(), 1.0])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--epochs", type=int)
    args = parser.parse_args(argv)
    config = Config.load(args.config)
    if args.epochs:
        config = dataclasses.replace(config, epochs=args.epochs)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format=f"%(levelname)s rank {rank} %(message)s",
        stream=sys.stdout,
    )
    stop = Stop()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 1)))
    optimizer = getattr(torch.optim, config.optimizer.name)(
        model.parameters(), lr=config.optimizer.lr
    )
    dataset = Squares()
    sampler = DistributedSampler(dataset, seed=3)
    loader = DataLoader(
        dataset,
        batch_size=config.batch_size,
        sampler=sampler,
        num_workers=config.num_workers,
        persistent_workers=config.num_workers > 0,
    )
    torch.manual_seed(rank)
    for epoch in range(config.epochs):
        sampler.set_epoch(epoch)
        logger.info("epoch %d loss %r", epoch, train_epoch(model, optimizer, loader, stop))
    if rank == 0:
        state = {"model": model.module.state_dict(), "config": dataclasses.asdict(config)}
        torch.save(state, "trainer.pt")
    dist.barrier()
    print("sum of params", repr(sum(p.double().sum().item() for p in model.parameters())))


if __name__ == "__main__":
    main()
