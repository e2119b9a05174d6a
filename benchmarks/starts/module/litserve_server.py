import litserve
import net
import torch


class Api(litserve.LitAPI):
    def setup(self, device):
        self.net = net.trained().to(device)

    def decode_request(self, request):
        return torch.tensor(request["image"])

    def predict(self, images):
        with torch.inference_mode():
            return self.net(torch.stack(list(images)))

    def encode_response(self, scores):
        return {"scores": scores.tolist()}


if __name__ == "__main__":
    litserve.LitServer(Api(max_batch_size=8)).run()
