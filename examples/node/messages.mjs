// The messages of hypha_ray/bridge/bridge.proto, and as much of protobuf as they need.
//
// A message is a list of fields [number, kind, name]; a kind is a scalar, another message, or one of these in an array.

const Content = [[1, "uint", "size"], [2, "bytes", "sha256"]];
const WeightUpdate = [[1, "string", "model_path"]];
const Slice = [[1, "string", "path"], [2, "uint", "samples"], [3, Content, "content"]];
export const MESSAGES = {
  hello: [10, [[1, "string", "name"], [2, "bytes", "nonce"], [3, "uint", "shares_files"]]],
  challenge: [11, [[1, "bytes", "session"], [2, "bytes", "nonce"]]],
  authenticate: [12, [[1, "bytes", "proof"]]],
  welcome: [13, [[1, "bytes", "proof"], [2, "double", "silence_s"]]],
  job: [14, [[1, "string", "path"], [2, Content, "content"]]],
  ready: [15, [[1, "string", "device"], [2, "uint", "parameters"]]],
  parameters: [20, [[1, "uint", "round"], [2, WeightUpdate, "update"], [3, Content, "content"]]],
  assignment: [21, [
    [1, "uint", "round"], [2, "uint", "version"], [3, "uint", "batch_size"], [4, [Slice], "train"],
    [5, [Slice], "evaluate"], [6, "uint", "gradient"], [7, "double", "learning_rate"], [8, "double", "last_learning_rate"],
  ]],
  merged: [22, [[1, "uint", "round"], [2, "double", "seconds"]]],
  metrics: [23, [
    [1, [[[1, "string", "key"], [2, "double", "value"]]], "items"], [2, "uint", "data_processed"], [3, "uint", "local_round"],
  ]],
  evaluation: [24, [[1, "uint", "round"], [2, "double", "loss_sum"], [3, "uint", "count"], [4, "optional", "correct"]]],
  update: [25, [
    [1, "uint", "round"], [2, WeightUpdate, "update"], [3, Content, "content"], [4, "uint", "samples"], [5, "uint", "tokens"],
    [6, "uint", "batches"], [7, "double", "loss"],
  ]],
  leave: [26, [[1, "string", "reason"]]],
  left: [27, []],
  done: [28, []],
  alive: [31, []],
  error: [32, [[1, "string", "code"], [2, "string", "text"]]],
};
export const ENVELOPE = [
  [1, "uint", "version"], [2, "uint", "sequence"], [3, "bytes", "session"],
  ...Object.entries(MESSAGES).map(([name, [number, fields]]) => [number, fields, name]),
];

function varint(value) {
  const bytes = [];
  for (; value > 127; value = Math.floor(value / 128)) bytes.push((value % 128) | 128);
  return Buffer.from([...bytes, value]);
}

export function encode(fields, message) {
  const parts = [];
  for (const [number, kind, name] of fields) {
    const repeated = Array.isArray(kind) && kind.length === 1 && Array.isArray(kind[0][0]);
    for (const value of repeated ? message[name] ?? [] : [message[name]]) {
      const inner = repeated ? kind[0] : kind;
      if (value === undefined || ((inner === "uint" || inner === "double") && !value)) continue; // Zero isn't sent.
      if (inner === "uint" || inner === "optional") parts.push(varint(number << 3), varint(Number(value)));
      else if (inner === "double") {
        const eight = Buffer.alloc(8);
        eight.writeDoubleLE(value);
        parts.push(varint((number << 3) | 1), eight);
      } else {
        const body = Array.isArray(inner) ? encode(inner, value) : Buffer.from(value);
        if (body.length || Array.isArray(inner)) parts.push(varint((number << 3) | 2), varint(body.length), body);
      }
    }
  }
  return Buffer.concat(parts);
}

export function decode(fields, body) {
  const message = {};
  let at = 0;
  const number = () => {
    for (let value = 0, scale = 1; ; scale *= 128) {
      const byte = body[at++];
      value += (byte & 127) * scale;
      if (byte < 128) return value;
    }
  };
  for (const [, kind, name] of fields) {
    if (kind === "uint" || kind === "double") message[name] = 0;
    else if (Array.isArray(kind) && kind.length === 1 && Array.isArray(kind[0][0])) message[name] = [];
  }
  while (at < body.length) {
    const tag = number();
    const [, kind, name] = fields.find(([field]) => field === tag >> 3) ?? [];
    let value;
    if ((tag & 7) === 0) value = number();
    else if ((tag & 7) === 1) (value = body.readDoubleLE(at)), (at += 8);
    else {
      const length = number();
      value = body.subarray(at, (at += length));
    }
    if (name === undefined) continue; // Something of a later version.
    if (kind === "string") value = value.toString();
    if (!Array.isArray(kind)) message[name] = value;
    else if (Array.isArray(message[name])) message[name].push(decode(kind[0], value));
    else message[name] = decode(kind, value);
  }
  return message;
}
