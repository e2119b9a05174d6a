// Tensors as Triton's HTTP endpoint takes and returns them: as JSON, or as bytes behind it.

const ARRAYS = {
  ...{ INT8: Int8Array, INT16: Int16Array, INT32: Int32Array, INT64: BigInt64Array },
  ...{ UINT8: Uint8Array, UINT16: Uint16Array, UINT32: Uint32Array, UINT64: BigUint64Array },
  ...{ FP16: globalThis.Float16Array, BF16: Uint16Array, FP32: Float32Array, FP64: Float64Array },
  BOOL: Uint8Array,
};
// JSON cannot hold all their values exactly, or Triton does not write them.
export const BINARY = ["BYTES", "FP16", "BF16", "FP32", "FP64", "INT64", "UINT64"];
const GENERATED = ["random", "zeros", "ones"];

export const count = (shape) => shape.reduce((product, size) => product * size, 1);

const bits = new DataView(new ArrayBuffer(4));

function toBrain(number) {
  bits.setFloat32(0, number);
  return bits.getUint16(0);
}

function fromBrain(half) {
  bits.setUint32(0, half << 16);
  return bits.getFloat32(0);
}

// Return the numbers of a text such as "[[1, 2], [3, 4]]" as they are written there: numbers of
// JavaScript would not hold all integers.
function tokens(text, datatype) {
  const words = text.split(/[\s,[\]]+/).filter(Boolean);
  const pattern = datatype === "BOOL" ? /^(true|false)$/ : /INT/.test(datatype) ? /^-?\d+$/ : /^-?\d+(\.\d+)?(e[-+]?\d+)?$/i;
  const wrong = words.find((word) => !pattern.test(word));
  if (wrong !== undefined) throw new Error(`"${wrong}" is not a value of ${datatype}`);
  return words;
}

function strings(text, size) {
  if (size === 1) return [text];
  const values = JSON.parse(text);
  if (!Array.isArray(values)) throw new Error("several strings are a JSON list");
  return values.flat(Infinity).map(String);
}

function packed(datatype, values) {
  const number = (word) => (word === "true" ? 1 : Number(word));
  const convert = { BF16: (word) => toBrain(number(word)), INT64: BigInt, UINT64: BigInt }[datatype];
  return new Uint8Array(ARRAYS[datatype].from(values, (word) => (convert ?? number)(word)).buffer);
}

function generated(word, datatype, size) {
  const value = { random: () => Math.random(), zeros: () => 0, ones: () => 1 }[word];
  const whole = /INT|BOOL/.test(datatype);
  return packed(datatype, Array.from({ length: size }, () => (whole ? Math.round(value()) : value())));
}

function lengthPrefixed(content) {
  const bytes = new Uint8Array(4 + content.length);
  new DataView(bytes.buffer).setUint32(0, content.length, true);
  bytes.set(content, 4);
  return bytes;
}

// Return a tensor of a request from what the form has for it: a text, or the bytes of a file.
export function tensor(name, datatype, shape, text, file) {
  const size = count(shape);
  const made = { name, datatype, shape, source: text.trim() };
  if (file) {
    if (size !== 1) throw new Error(`${name}: a file is one value, and the shape has ${size}`);
    return { ...made, bytes: lengthPrefixed(file) };
  }
  if (datatype !== "BYTES" && GENERATED.includes(made.source)) {
    return { ...made, bytes: generated(made.source, datatype, size) };
  }
  const values = datatype === "BYTES" ? strings(text, size).map((value) => JSON.stringify(value)) : tokens(text, datatype);
  if (values.length !== size) {
    throw new Error(`${name}: the shape has ${size} values, and there are ${values.length}`);
  }
  const isBinary = datatype === "FP16" || datatype === "BF16";
  return isBinary ? { ...made, values, bytes: packed(datatype, values) } : { ...made, values };
}

// Return the JSON of a request, and the bytes that follow it.
export function request(tensors, parameters, outputs) {
  const inputs = tensors.map(({ name, datatype, shape, values, bytes }) => {
    const head = `"name": ${JSON.stringify(name)}, "datatype": "${datatype}", "shape": [${shape.join(", ")}]`;
    if (bytes) return `{${head}, "parameters": {"binary_data_size": ${bytes.length}}}`;
    return `{${head}, "data": [${values.join(", ")}]}`;
  });
  const parts = [`"inputs": [${inputs.join(",\n ")}]`];
  if (outputs.length) parts.push(`"outputs": ${JSON.stringify(outputs)}`);
  if (Object.keys(parameters).length) parts.push(`"parameters": ${JSON.stringify(parameters)}`);
  return { json: `{${parts.join(",\n")}}`, bytes: tensors.flatMap((made) => made.bytes ?? []) };
}

// Return the values of an output: numbers as text, strings as bytes.
function unpacked(datatype, bytes) {
  if (datatype !== "BYTES") {
    const numbers = new ARRAYS[datatype](bytes.slice().buffer);
    return Array.from(numbers, (number) => `${datatype === "BF16" ? fromBrain(number) : number}`);
  }
  const [values, view] = [[], new DataView(bytes.buffer, bytes.byteOffset)];
  for (let at = 0; at < bytes.length; ) {
    const length = view.getUint32(at, true);
    values.push(bytes.subarray(at + 4, at + 4 + length));
    at += 4 + length;
  }
  return values;
}

// Return the outputs of a response, whose JSON has a length if bytes follow it.
export function outputs(body, length) {
  const split = length ? Number(length) : body.length;
  const response = JSON.parse(new TextDecoder().decode(body.subarray(0, split)));
  let at = split;
  return (response.outputs ?? []).map(({ name, datatype, shape, data, parameters }) => {
    const size = parameters?.binary_data_size;
    if (size === undefined) return { name, datatype, shape, values: data.map((value) => `${value}`) };
    at += size;
    return { name, datatype, shape, values: unpacked(datatype, body.subarray(at - size, at)) };
  });
}
