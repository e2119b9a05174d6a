import litserve
import torch
import transformers


class Api(litserve.LitAPI):
    def setup(self, device):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained("reviews")
        model = transformers.AutoModelForSequenceClassification.from_pretrained("reviews")
        self.model = model.to(device)

    def decode_request(self, request):
        return request["text"]

    def predict(self, texts):
        batch = self.tokenizer(list(texts), padding=True, return_tensors="pt")
        with torch.inference_mode():
            return self.model(**batch.to(self.model.device)).logits

    def encode_response(self, logits):
        return {"logits": logits.tolist()}


if __name__ == "__main__":
    litserve.LitServer(Api(max_batch_size=8)).run()
