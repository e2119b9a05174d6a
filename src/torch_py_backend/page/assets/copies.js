// The request of the form as a command and as a program.
import { element } from "./elements.js";

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const NUMPY_TYPES = { BF16: "ml_dtypes.bfloat16", BOOL: "np.bool_" };
const literal = JSON.stringify; // a string of JSON is one of Python, too

function curl({ url, body, isStream, hasBytes, headerLength }) {
  if (!hasBytes) return `curl ${isStream ? "-N " : ""}${quoted(url)} -d ${quoted(body)}`;
  return (
    `# request.bin is the file below.\ncurl ${quoted(url)} --data-binary @request.bin \\\n` +
    `  -H 'Inference-Header-Content-Length: ${headerLength}' --output answer.bin`
  );
}

function array({ datatype, shape, values, source, bytes }) {
  const dims = `[${shape.join(", ")}]`;
  if (datatype === "BYTES") {
    const value = bytes ? `open("file", "rb").read()` : values.map((text) => `${text}.encode()`).join(", ");
    return `np.array([${value}], dtype=object).reshape(${dims})`;
  }
  const type = NUMPY_TYPES[datatype] ?? `np.${datatype.toLowerCase().replace("fp", "float")}`;
  if (source === "random") return `np.random.rand(*${dims}).astype(${type})`;
  if (source === "zeros" || source === "ones") return `np.${source}(${dims}, dtype=${type})`;
  const words = values.map((word) => ({ true: "True", false: "False" })[word] ?? word);
  return `np.array([${words.join(", ")}], dtype=${type}).reshape(${dims})`;
}

function python({ model, tensors, parameters, isStream, host, ports }) {
  const client = isStream ? "grpc" : "http";
  const options = Object.entries(parameters).map(([key, value]) => `, ${key}=${value === true ? "True" : value}`);
  const lines = ["import numpy as np", `import tritonclient.${client}`, ""];
  lines.push(`client = tritonclient.${client}.InferenceServerClient("${host}:${ports[isStream ? 1 : 0]}")`);
  if (tensors.some(({ datatype }) => datatype === "BF16")) lines.unshift("import ml_dtypes");
  lines.push("inputs = []");
  for (const made of tensors) {
    lines.push(`array = ${array(made)}`);
    lines.push(`inputs.append(tritonclient.${client}.InferInput(${literal(made.name)}, array.shape, "${made.datatype}"))`);
    lines.push("inputs[-1].set_data_from_numpy(array)");
  }
  if (isStream) {
    lines.push("client.start_stream(lambda result, error: print(error or result.get_response()))");
    lines.push(`client.async_stream_infer(${literal(model)}, inputs${options.join("")})`);
    lines.push("client.stop_stream()");
  } else {
    lines.push(`result = client.infer(${literal(model)}, inputs${options.join("")})`);
    lines.push("for output in result.get_response()[\"outputs\"]:");
    lines.push("    print(output[\"name\"], result.as_numpy(output[\"name\"]))");
  }
  return lines.join("\n");
}

function copyable(title, text) {
  const code = element("pre", { tabIndex: 0, ariaLabel: title }, text);
  code.setAttribute("role", "region");
  const button = element("button", { type: "button" }, "Copy");
  button.addEventListener("click", () => {
    getSelection().selectAllChildren(code); // a page without TLS has no navigator.clipboard
    button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
  });
  return element("details", { open: title === "curl" }, element("summary", {}, title), button, code);
}

// Return the elements for a request.
export function copies(request) {
  const shown = [copyable("curl", curl(request)), copyable("Python", python(request)), copyable("JSON", request.body)];
  if (request.hasBytes) {
    const link = element("a", { href: "#", download: "request.bin" }, "request.bin");
    const file = new Blob([request.body, ...request.bytes]);
    link.addEventListener("click", () => (link.href = URL.createObjectURL(file)), { once: true });
    shown.push(link);
  }
  return shown;
}
