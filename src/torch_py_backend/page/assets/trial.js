// The form that sends a request to one model.
import { copies } from "./copies.js";
import { element } from "./elements.js";
import { BINARY, count, outputs, request, tensor } from "./tensors.js";

const SHOWN_VALUES = 200;
const SHOWN_RESPONSES = 500;
const LONGEST = 20000;
const SEQUENCE = Math.ceil(Math.random() * 2 ** 48); // not that of a client
const decoder = new TextDecoder();
const IMAGES = { png: /^\x89PNG/, jpeg: /^\xff\xd8\xff/, gif: /^GIF8/, webp: /^RIFF.{4}WEBP/s };

function imageType(bytes) {
  const start = String.fromCharCode(...bytes.subarray(0, 12));
  const type = Object.keys(IMAGES).find((name) => IMAGES[name].test(start));
  return type && `image/${type}`;
}

function image(bytes, type) {
  return element("img", { src: URL.createObjectURL(new Blob([bytes], { type })), alt: "the image" });
}

function renewed(element) {
  const made = element.cloneNode(false);
  element.replaceWith(made);
  return made;
}

// The controls for one input, filled with its example or with made-up values.
class Input {
  constructor(entry, isBatch, example) {
    this.name = entry.name;
    this.datatype = entry.data_type.replace("TYPE_", "").replace("STRING", "BYTES");
    const rank = entry.dims.length + (isBatch ? 1 : 0);
    const dims = [...(isBatch ? [1] : []), ...entry.dims.map((size) => Math.max(Number(size), 1))];
    const fits = example?.shape.length === rank;
    this.shape = element("input", { value: (fits ? example.shape : dims).join(", "), size: 12 });
    this.text = element("textarea", { rows: 2, value: this.made(fits ? example : null, count(dims)), spellcheck: false });
    this.sent = element("input", { type: "checkbox", checked: fits || !entry.optional });
    this.file = element("input", { type: "file" });
    this.preview = element("span");
    this.file.addEventListener("change", () => this.read());
    const fields = [
      element("label", {}, "Shape ", this.shape),
      element("label", { className: "wide" }, "Values ", this.text),
    ];
    if (entry.optional) fields.unshift(element("label", {}, this.sent, " Send this optional input"));
    if (this.datatype === "BYTES") fields.push(element("label", {}, "or a file ", this.file), this.preview);
    const legend = element("legend", {}, `${entry.name} `, element("small", {}, this.datatype));
    this.fields = element("fieldset", {}, legend, ...fields);
  }

  // Return the text for an example, or for one value for each place; keep the bytes of a file.
  made(example, size) {
    const [first, ...others] = example?.data ?? [];
    if (first?.base64) {
      this.bytes = Uint8Array.from(atob(first.base64), (char) => char.charCodeAt(0));
      queueMicrotask(() => this.show());
      return "";
    }
    const isNote = !others.length && / values$/.test(first);
    if (this.datatype === "BYTES") {
      if (!example || isNote) return size === 1 ? "text" : JSON.stringify(Array(size).fill("text"));
      return others.length ? JSON.stringify(example.data) : first;
    }
    const isFloat = !/INT|BOOL/.test(this.datatype);
    if (isNote || (!example && size > 64)) return isFloat ? "random" : "zeros";
    const value = this.datatype === "BOOL" ? "false" : "0";
    return (example?.data ?? Array(size).fill(value)).join(", ");
  }

  async read() {
    const [file] = this.file.files;
    this.bytes = file && new Uint8Array(await file.arrayBuffer());
    this.show();
    this.fields.dispatchEvent(new Event("input", { bubbles: true }));
  }

  show() {
    const type = this.bytes && imageType(this.bytes);
    const text = this.bytes ? `${this.bytes.length} bytes` : "";
    this.preview.replaceChildren(type ? image(this.bytes, type) : text);
    this.text.disabled = Boolean(this.bytes);
  }

  tensor() {
    const shape = this.shape.value.split(/[\s,[\]x]+/).filter(Boolean).map(Number);
    if (!shape.every((size) => Number.isInteger(size) && size >= 0) || count(shape) > 1e6) {
      throw new Error(`${this.name}: the shape is a list of sizes such as 1, 4`);
    }
    return tensor(this.name, this.datatype, shape, this.text.value, this.bytes);
  }
}

export class Trial {
  constructor(form, model, config, examples, ports, credentials) {
    Object.assign(this, { form, model, config, ports, credentials });
    this.isStream = Boolean(config.model_transaction_policy?.decoupled);
    this.endpoint = `models/${encodeURIComponent(model)}/${this.isStream ? "generate_stream" : "infer"}`;
    const isBatch = config.max_batch_size > 0;
    const example = (name) => examples.find((entry) => entry.name === name);
    this.inputs = config.input.map((entry) => new Input(entry, isBatch, example(entry.name)));
    form.querySelector("#inputs").replaceChildren(...this.inputs.map((input) => input.fields));
    // Not those of the model before, whose answer may still come.
    [this.answer, this.line] = ["#answer", "#sent"].map((id) => renewed(form.querySelector(id)));
    form.querySelector("button").disabled = false;
    form.onsubmit = (event) => this.send(event);
    form.oninput = () => this.showCopies();
    this.showCopies();
  }

  report(text, isProblem = false) {
    this.line.textContent = text;
    this.line.classList.toggle("problem", isProblem);
  }

  // Return the body for one endpoint. Over HTTP, streams take the JSON of "generate_stream".
  request(outputs) {
    const tensors = this.inputs.filter((input) => input.sent.checked).map((input) => input.tensor());
    const parameters = this.config.sequence_batching ? { sequence_id: SEQUENCE, sequence_start: true, sequence_end: true } : {};
    if (!this.isStream) return { tensors, parameters, ...request(tensors, parameters, outputs) };
    if (tensors.some((made) => made.bytes)) throw new Error("Triton's generate_stream takes no binary values; use gRPC");
    const list = (values) => (values.length === 1 ? values[0] : `[${values.join(", ")}]`);
    const entries = tensors.map(({ name, values }) => `${JSON.stringify(name)}: ${list(values)}`);
    return { tensors, parameters, json: `{${entries.join(", ")}}`, bytes: [] };
  }

  showCopies() {
    let shown = [];
    try {
      const { tensors, parameters, json, bytes } = this.request([]);
      const [host, ports] = [location.hostname, this.ports];
      shown = copies({
        url: `http://${host}:${ports[0]}/v2/${this.endpoint}`,
        body: json,
        headerLength: new TextEncoder().encode(json).length,
        hasBytes: bytes.length > 0,
        ...{ bytes, host, ports, tensors, parameters, model: this.model, isStream: this.isStream },
      });
      this.report("");
    } catch (error) {
      this.report(error.message, true);
    }
    this.form.querySelector("#copies").replaceChildren(...shown);
  }

  async send(event) {
    event.preventDefault();
    const button = event.submitter ?? this.form.querySelector("button");
    button.disabled = true;
    this.report("Waiting for the answer …");
    const began = performance.now();
    try {
      const binary = this.config.output.map(({ name, data_type: type }) => {
        const datatype = type.replace("TYPE_", "").replace("STRING", "BYTES");
        return { name, parameters: { binary_data: BINARY.includes(datatype) } };
      });
      const { json, bytes } = this.request(binary);
      const headers = this.credentials();
      if (bytes.length) headers["Inference-Header-Content-Length"] = `${new TextEncoder().encode(json).length}`;
      const response = await fetch(this.endpoint, { method: "POST", headers, body: new Blob([json, ...bytes]) });
      if (!response.ok) throw new Error(await response.text());
      this.answer.replaceChildren();
      const number = await (this.isStream ? this.showStream(response) : this.show(response));
      const elapsed = performance.now() - began;
      this.report(`${number}${elapsed.toFixed(elapsed < 10 ? 1 : 0)} ms${elapsed > 9900 ? "; cut off here" : ""}`);
    } catch (error) {
      this.report(error.message, true);
    }
    button.disabled = false;
  }

  // Show an answer, which is a line with Triton's status and the body.
  async show(response) {
    const bytes = new Uint8Array(await response.arrayBuffer());
    const end = bytes.indexOf(10);
    const [status, length] = JSON.parse(decoder.decode(bytes.subarray(0, end)));
    const body = bytes.subarray(end + 1);
    if (status !== 200) throw new Error(refusal(decoder.decode(body)));
    this.answer.replaceChildren(...outputs(body, length).map(shown));
    return "";
  }

  // Show the responses of a stream as they come; return how many they are.
  async showStream(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let [rest, status, responses] = ["", 0, 0]; ; ) {
      const { value, done } = await reader.read();
      const lines = (rest + (value ?? "\n")).split("\n");
      rest = lines.pop();
      if (!status && lines.length) [status] = JSON.parse(lines.shift());
      for (const line of lines.filter(Boolean)) {
        const text = refusal(line.replace(/^data:/, "")).slice(0, LONGEST);
        if (status !== 200) throw new Error(text);
        responses += 1;
        if (responses <= SHOWN_RESPONSES) this.answer.append(element("p", { className: "response" }, text));
      }
      if (done) return `${responses} responses in `;
    }
  }
}

// Return what a text in JSON says: an error, or the outputs of one response of a stream.
function refusal(text) {
  try {
    const { error, model_name: _, model_version: __, ...values } = JSON.parse(text);
    return error ?? JSON.stringify(values);
  } catch {
    return text;
  }
}

function shown({ name, datatype, shape, values }) {
  const parts = values.slice(0, SHOWN_VALUES).map((value) => {
    if (typeof value === "string") return value;
    const type = imageType(value);
    if (type) return image(value, type);
    return JSON.stringify(decoder.decode(value).slice(0, LONGEST));
  });
  const more = values.length > SHOWN_VALUES ? ` … ${values.length} values` : "";
  const list = element("p", { className: "values" });
  parts.forEach((part, index) => list.append(index ? ", " : "", part));
  list.append(more);
  return element("div", {}, element("h4", {}, `${name} `, element("small", {}, `${datatype} [${shape.join(", ")}]`)), list);
}
