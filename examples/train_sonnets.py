"""Train the text generator on examples/sonnets.txt and write its weights into the repository.

    python examples/train_sonnets.py

Takes a minute or two on one core and gives the same weights on every run. The text is 23 of
Shakespeare's sonnets (1609): 1 to 3, 12, 15, 18, 19, 27, 29, 30, 33, 55, 60, 65, 66, 71, 73, 94,
97, 106, 116, 130 and 138. The network nearly memorizes so short a text.
"""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

TEXT = Path(__file__).with_name("sonnets.txt")
MODEL_SOURCE = Path(__file__).parent / "model_repository" / "sonnets" / "1" / "model.py"
WEIGHTS = MODEL_SOURCE.with_name("model.safetensors")

SEED = 0
STEPS = 1500
BATCH_SIZE = 24
WINDOW = 96  # characters that are learnt from in a row
PEAK_LEARNING_RATE = 4e-3
REQUIRED_LOSS = 1.0  # nats for a character; a guess among all of them costs 4.2


def model_source() -> ModuleType:
    """Load the served module from its file; a repository folder is not a package."""
    spec = importlib.util.spec_from_file_location("model", MODEL_SOURCE)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{MODEL_SOURCE} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def windows(codes: Tensor, count: int, length: int) -> tuple[Tensor, Tensor]:
    """Return random parts of the text, and the same parts one character later as targets."""
    starts = torch.randint(0, len(codes) - length - 1, (count,))
    places = starts[:, None] + torch.arange(length)
    return codes[places], codes[places + 1]


def loss(model: nn.Module, codes: Tensor, following: Tensor) -> Tensor:
    return functional.cross_entropy(model(codes).flatten(0, 1), following.flatten())


def train(model: nn.Module, codes: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, STEPS)
    model.train()
    for step in range(STEPS):
        found = loss(model, *windows(codes, BATCH_SIZE, WINDOW))
        optimizer.zero_grad()
        found.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step:5}: {found.item():.2f} nats for a character")
    model.eval()


def written(model: Any, prompt: str, length: int) -> str:
    """Continue a text with begin() and step(), as the backend does."""
    text = prompt
    with torch.inference_mode():
        verse = model.begin(prompt, length)
        while verse is not None:
            ((verse, (character,)),) = model.step([verse])
            text += character
    return text


def main() -> None:
    torch.manual_seed(SEED)
    # One thread: the order of additions, and so the weights, must not depend on the machine.
    torch.set_num_threads(1)
    source = model_source()
    text = TEXT.read_text(encoding="utf-8")
    codes = torch.tensor([source.ALPHABET.index(character) for character in text])
    model = source.Poet()
    train(model, codes)
    with torch.inference_mode():
        reached = float(loss(model, *windows(codes, 64, WINDOW)))
    if reached > REQUIRED_LOSS:
        raise SystemExit(f"{reached:.2f} nats are above {REQUIRED_LOSS}: nothing was written.")
    save_file(model.state_dict(), WEIGHTS)
    print(written(model, "Shall I compare", 400))
    print(f"wrote {WEIGHTS} ({WEIGHTS.stat().st_size / 1024:.0f} KiB)")


if __name__ == "__main__":
    main()
