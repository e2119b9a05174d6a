"""Train the recurrent digits network and write its weights into the example model repository.

    python examples/train_lstm.py

Takes seconds on one core and gives the same weights on every run. The held-out digits are looked
at once, after the last step.
"""

import importlib.util
import math
from pathlib import Path

import torch
from digits_data import REQUIRED_ROWS_ACCURACY, Digits, load_split
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from train_digits import SEED, shifted

VERSION = Path(__file__).parent / "model_repository" / "digits_lstm" / "1"
WEIGHTS = VERSION / "model.safetensors"

EPOCHS = 40
BATCH_SIZE = 64
PEAK_LEARNING_RATE = 1e-2


def new_model() -> nn.Module:
    """Load the served class from its file; a repository folder is not a package."""
    spec = importlib.util.spec_from_file_location("model", VERSION / "model.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"{VERSION} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: nn.Module = module.DigitsLSTM()
    return model


def read(model: nn.Module, images: Tensor) -> Tensor:
    """Return the logits after the last row of each image."""
    hidden = cell = images.new_zeros(len(images), 64)
    for row in images[:, 0].unbind(1):
        made = model(row, hidden, cell)
        hidden, cell = made["new_hidden"], made["new_cell"]
    logits: Tensor = made["logits"]
    return logits


def train(model: nn.Module, digits: Digits) -> None:
    images, labels = torch.from_numpy(digits.images), torch.from_numpy(digits.labels)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-2)
    steps = EPOCHS * math.ceil(len(images) / BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, steps)
    model.train()
    for _ in range(EPOCHS):
        for chosen in torch.split(torch.randperm(len(images)), BATCH_SIZE):
            loss = functional.cross_entropy(read(model, shifted(images[chosen])), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()


def accuracy(model: nn.Module, digits: Digits) -> float:
    with torch.inference_mode():
        predicted = read(model, torch.from_numpy(digits.images)).argmax(dim=1)
    return float((predicted == torch.from_numpy(digits.labels)).double().mean())


def main() -> None:
    torch.manual_seed(SEED)
    # One thread: the order of additions, and so the weights, must not depend on the machine.
    torch.set_num_threads(1)
    digits = load_split()
    model = new_model()
    train(model, digits.train)
    share = accuracy(model, digits.held_out)
    print(f"{share:.2%} of {len(digits.held_out.labels)} held-out digits are read correctly.")
    if share < REQUIRED_ROWS_ACCURACY:
        raise SystemExit(
            f"At least {REQUIRED_ROWS_ACCURACY:.0%} are required: nothing was written."
        )
    save_file(model.state_dict(), WEIGHTS)
    print(f"wrote {WEIGHTS} ({WEIGHTS.stat().st_size / 1024:.0f} KiB)")


if __name__ == "__main__":
    main()
