// Safetensors files.

import { createHash } from "node:crypto";
import { readFileSync, writeFileSync } from "node:fs";

const ARRAYS = { F32: Float32Array, I64: BigInt64Array, I32: Int32Array };

export function loadTensors(path) {
  const data = readFileSync(path);
  const length = Number(data.readBigUInt64LE(0));
  const { __metadata__, ...header } = JSON.parse(data.subarray(8, 8 + length).toString());
  return Object.fromEntries(
    Object.entries(header).map(([name, { dtype, shape, data_offsets: [start, stop] }]) => {
      const bytes = new Uint8Array(data.subarray(8 + length + start, 8 + length + stop)); // A copy, and aligned.
      return [name, { dtype, shape, data: new ARRAYS[dtype](bytes.buffer) }];
    }),
  );
}

export function saveTensors(path, tensors) {
  let at = 0;
  const header = {};
  for (const [name, { dtype, shape, data }] of Object.entries(tensors))
    header[name] = { dtype, shape, data_offsets: [at, (at += data.byteLength)] };
  const text = Buffer.from(JSON.stringify(header));
  const size = Buffer.alloc(8);
  size.writeBigUInt64LE(BigInt(text.length));
  const bodies = Object.values(tensors).map(({ data }) => Buffer.from(data.buffer, data.byteOffset, data.byteLength));
  const bytes = Buffer.concat([size, text, ...bodies]);
  writeFileSync(path, bytes);
  return { size: bytes.length, sha256: createHash("sha256").update(bytes).digest() };
}
