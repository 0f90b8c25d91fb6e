"""Train the digits CNN on several processes with PyTorch's own engines, DDP or FSDP2.

    torchrun --nproc-per-node 2 examples/ddp.py [--fsdp] [--dtype float16] [--steps 40]

On CPUs the processes talk through gloo, on GPUs through NCCL, one GPU each. Convert first, then wrap. With DDP the
scaler needs nothing; with FSDP2 it sees by the parameters which ranks have to skip together. All ranks print the same
scale and the same sum of their weights: they took the same steps.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits_cnn import DigitsCNN, load
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import fxprec


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train the digits CNN on several processes")
    parser.add_argument("--fsdp", action="store_true", help="shard with fully_shard in place of DDP")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), help="default: float16 on CUDA, bfloat16 on CPUs")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=16, help="channels of the first block")
    parser.add_argument("--batch", type=int, default=32, help="of each process")
    options = parser.parse_args(arguments)

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    model: DigitsCNN = DigitsCNN(options.width).to(device)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    # A scaler that works in bfloat16 too, so that the same lines serve both. Its scale grows every 20 good steps here.
    scaler = fxprec.LossScaler(device.type, growth_interval=20)
    fxprec.convert(model, dtype=dtype, scaler=scaler)
    if options.fsdp:
        fully_shard(model.features)
        fully_shard(model.classifier)
        fully_shard(model)
        wrapped = model
    else:
        wrapped = DistributedDataParallel(model, device_ids=[device.index] if cuda else None)
    optimizer = fxprec.optim.AdamW(model.parameters(), lr=1e-3, max_norm=1.0)

    data = load()
    digits = TensorDataset(data.train_x, data.train_y)
    sampler = DistributedSampler(digits, seed=0, drop_last=True)
    loader = DataLoader(digits, options.batch, sampler=sampler, drop_last=True)
    step, loss = 0, torch.zeros(())
    while step < options.steps:
        sampler.set_epoch(step)
        for x, y in loader:
            if step == options.steps:
                break
            optimizer.zero_grad()
            loss = F.cross_entropy(wrapped(x.to(device)), y.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            step += 1

    weights = sum(_whole(parameter).double().sum().item() for parameter in model.parameters())
    print(
        f"rank {dist.get_rank()}: {step} steps, {scaler.skipped_steps} skipped, loss {loss.item():.3f}, "
        f"scale {scaler.get_scale():g}, sum of weights {weights:.6f}",
        flush=True,
    )
    # In this order, and with the interpreter free meanwhile: a gloo thread that lets go of the last reduction needs it,
    # and DDP's end would wait for that thread.
    del wrapped
    dist.barrier()
    dist.destroy_process_group()


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    """Of a sharded parameter all of it."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()  # type: ignore[operator]


if __name__ == "__main__":
    main()
