import transformers

import torch_py_backend

model = transformers.AutoModelForSequenceClassification.from_pretrained("reviews")
tokenizer = transformers.AutoTokenizer.from_pretrained("reviews")
torch_py_backend.save_model(model, "models/reviews", processor=tokenizer)
with torch_py_backend.serve("models") as server:
    print(server.infer("reviews", ["a fine film"]))
