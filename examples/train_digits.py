"""Train the digits network and write its weights into the example model repository.

    python examples/train_digits.py

Takes seconds on one core and gives the same weights on every run. The held-out digits are looked
at once, after the last step.
"""

import importlib.util
import io
import math
import zipfile
from pathlib import Path

import torch
from digits_data import REQUIRED_ACCURACY, Digits, load_split
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

REPOSITORY = Path(__file__).parent / "model_repository"
MODEL_SOURCE = REPOSITORY / "digits" / "1" / "model.py"
WEIGHTS = REPOSITORY / "digits" / "1" / "model.safetensors"
TORCHSCRIPT = REPOSITORY / "digits_torchscript" / "1" / "model.pt"

SEED = 0
EPOCHS = 30
BATCH_SIZE = 64
PEAK_LEARNING_RATE = 5e-3


def new_model() -> nn.Module:
    """Load the served class from its file; a repository folder is not a package."""
    spec = importlib.util.spec_from_file_location("model", MODEL_SOURCE)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{MODEL_SOURCE} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: nn.Module = module.DigitsCNN()
    return model


def shifted(images: Tensor) -> Tensor:
    """Shift each image by up to one pixel in each direction, as augmentation."""
    padded = functional.pad(images, (1, 1, 1, 1))
    offsets = torch.randint(0, 3, (len(images), 2)).tolist()
    return torch.stack(
        [
            image[:, top : top + 8, left : left + 8]
            for image, (top, left) in zip(padded, offsets, strict=True)
        ]
    )


def train(model: nn.Module, digits: Digits) -> None:
    images, labels = torch.from_numpy(digits.images), torch.from_numpy(digits.labels)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-2)
    steps = EPOCHS * math.ceil(len(images) / BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, steps)
    model.train()
    for _ in range(EPOCHS):
        for chosen in torch.split(torch.randperm(len(images)), BATCH_SIZE):
            loss = functional.cross_entropy(model(shifted(images[chosen])), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()


def accuracy(model: nn.Module, digits: Digits) -> float:
    with torch.inference_mode():
        predicted = model(torch.from_numpy(digits.images)).argmax(dim=1)
    return float((predicted == torch.from_numpy(digits.labels)).double().mean())


def without_source_paths(archive: io.BytesIO) -> io.BytesIO:
    """Return the TorchScript archive without debug records, which contain local paths."""
    stripped = io.BytesIO()
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(stripped, "w") as target:
        for member in source.infolist():
            if not member.filename.endswith(".debug_pkl"):
                target.writestr(member, source.read(member))
    stripped.seek(0)
    return stripped


def save_torchscript(model: nn.Module, path: Path) -> None:
    archive = io.BytesIO()
    torch.jit.save(torch.jit.script(model), archive)
    # Load and save again, so that PyTorch lays out the file with aligned tensors, which can be
    # mapped into memory.
    clean = torch.jit.load(without_source_paths(archive))
    torch.jit.save(clean, path)


def main() -> None:
    torch.manual_seed(SEED)
    # One thread: the order of additions, and so the weights, must not depend on the machine.
    torch.set_num_threads(1)
    digits = load_split()
    model = new_model()
    train(model, digits.train)
    share = accuracy(model, digits.held_out)
    print(f"{share:.2%} of {len(digits.held_out.labels)} held-out digits are read correctly.")
    if share < REQUIRED_ACCURACY:
        raise SystemExit(f"At least {REQUIRED_ACCURACY:.0%} are required: nothing was written.")
    save_file(model.state_dict(), WEIGHTS)
    save_torchscript(model, TORCHSCRIPT)
    for path in (WEIGHTS, TORCHSCRIPT):
        print(f"wrote {path} ({path.stat().st_size / 1024:.0f} KiB)")


if __name__ == "__main__":
    main()
