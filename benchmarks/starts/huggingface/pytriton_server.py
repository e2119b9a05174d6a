import numpy as np
import torch
import transformers
from pytriton.client import ModelClient
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton

tokenizer = transformers.AutoTokenizer.from_pretrained("reviews")
model = transformers.AutoModelForSequenceClassification.from_pretrained("reviews")


@batch
def infer(text):
    texts = [row.decode() for row in text[:, 0]]
    with torch.inference_mode():
        return [model(**tokenizer(texts, padding=True, return_tensors="pt")).logits.numpy()]


with Triton() as triton:
    triton.bind(
        model_name="reviews",
        infer_func=infer,
        inputs=[Tensor(name="text", dtype=bytes, shape=(1,))],
        outputs=[Tensor(name="logits", dtype=np.float32, shape=(-1,))],
        config=ModelConfig(max_batch_size=8),
    )
    triton.run()
    with ModelClient("localhost", "reviews") as client:
        print(client.infer_batch(np.array([[b"a fine film"]]))["logits"])
