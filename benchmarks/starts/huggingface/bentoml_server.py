import bentoml
import numpy as np
import torch
import transformers


@bentoml.service
class Service:
    def __init__(self):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained("reviews")
        self.model = transformers.AutoModelForSequenceClassification.from_pretrained("reviews")

    @bentoml.api(batchable=True)
    def predict(self, texts: list[str]) -> np.ndarray:
        batch = self.tokenizer(texts, padding=True, return_tensors="pt")
        with torch.inference_mode():
            return self.model(**batch).logits.numpy()
