// The model of jobs/configs/bridge.toml, its gradient by hand, and its optimizer.
//
// e = W x + b + p₁, c = t + p₀ (a learned token); both are normalised; the classifier sees them side by side.

const NAMES = {
  W: "dinov2.embeddings.patch_embeddings.projection.weight",
  b: "dinov2.embeddings.patch_embeddings.projection.bias",
  t: "dinov2.embeddings.cls_token",
  p: "dinov2.embeddings.position_embeddings",
  gain: "dinov2.layernorm.weight",
  bias: "dinov2.layernorm.bias",
  C: "classifier.weight",
  d: "classifier.bias",
};

export class Model {
  constructor(config) {
    Object.assign(this, { inputs: config.image_size ** 2, hidden: config.hidden_size, classes: config.num_labels });
    this.epsilon = config.layer_norm_eps ?? 1e-6;
    this.moments = {};
    this.steps = 0;
  }

  load(tensors) {
    this.tensors = tensors;
    this.w = Object.fromEntries(Object.entries(NAMES).map(([short, name]) => [short, tensors[name].data]));
  }

  parameters() {
    const { inputs, hidden, classes } = this;
    return hidden * inputs + hidden + hidden + hidden /* an unused mask */ + 2 * hidden + 2 * hidden + 2 * hidden * classes + classes;
  }

  normalise(v) {
    const mean = v.reduce((sum, x) => sum + x, 0) / v.length;
    const scale = 1 / Math.sqrt(v.reduce((sum, x) => sum + (x - mean) ** 2, 0) / v.length + this.epsilon);
    return { unit: v.map((x) => (x - mean) * scale), scale };
  }

  // Loss and hit of one sample; its gradient is added to g, if there is one.
  sample(x, label, g) {
    const { w, hidden, inputs, classes } = this;
    const embedded = [new Float64Array(hidden), new Float64Array(hidden)];
    for (let i = 0; i < hidden; i++) {
      embedded[0][i] = w.t[i] + w.p[i];
      let sum = w.b[i] + w.p[hidden + i];
      for (let j = 0; j < inputs; j++) sum += w.W[i * inputs + j] * x[j];
      embedded[1][i] = sum;
    }
    const normal = embedded.map((v) => this.normalise(v));
    const features = new Float64Array(2 * hidden).map((_, i) => {
      const [half, k] = [Math.floor(i / hidden), i % hidden];
      return normal[half].unit[k] * w.gain[k] + w.bias[k];
    });
    const logits = new Float64Array(classes).map((_, k) => {
      let sum = w.d[k];
      for (let i = 0; i < 2 * hidden; i++) sum += w.C[k * 2 * hidden + i] * features[i];
      return sum;
    });
    const top = Math.max(...logits);
    const total = logits.reduce((sum, z) => sum + Math.exp(z - top), 0);
    const loss = top + Math.log(total) - logits[label];
    if (g) this.backward(x, g, features, normal, logits.map((z, k) => Math.exp(z - top) / total - (k === label ? 1 : 0)));
    return { loss, hit: logits.indexOf(top) === label ? 1 : 0 };
  }

  backward(x, g, features, normal, slope) {
    const { w, hidden, inputs, classes } = this;
    const back = new Float64Array(2 * hidden);
    for (let k = 0; k < classes; k++) {
      g.d[k] += slope[k];
      for (let i = 0; i < 2 * hidden; i++) {
        g.C[k * 2 * hidden + i] += slope[k] * features[i];
        back[i] += slope[k] * w.C[k * 2 * hidden + i];
      }
    }
    for (const half of [0, 1]) {
      const { unit, scale } = normal[half];
      let [mean, along] = [0, 0];
      const inner = new Float64Array(hidden);
      for (let i = 0; i < hidden; i++) {
        const one = back[half * hidden + i];
        g.gain[i] += one * unit[i];
        g.bias[i] += one;
        inner[i] = one * w.gain[i];
        mean += inner[i] / hidden;
        along += (inner[i] * unit[i]) / hidden;
      }
      for (let i = 0; i < hidden; i++) {
        const one = scale * (inner[i] - mean - unit[i] * along);
        g.p[half * hidden + i] += one;
        if (half === 0) g.t[i] += one;
        else {
          g.b[i] += one;
          for (let j = 0; j < inputs; j++) g.W[i * inputs + j] += one * x[j];
        }
      }
    }
  }

  // Mean loss and mean gradient of a batch.
  gradient(images, labels) {
    const g = this.zeros();
    let loss = 0;
    for (let n = 0; n < labels.length; n++)
      loss += this.sample(images.subarray(n * this.inputs, (n + 1) * this.inputs), labels[n], g).loss;
    for (const one of Object.values(g)) for (let i = 0; i < one.length; i++) one[i] /= labels.length;
    return { loss: loss / labels.length, g };
  }

  zeros() {
    return Object.fromEntries(Object.entries(this.w).map(([name, data]) => [name, new Float64Array(data.length)]));
  }

  // Adds a batch's mean gradient to a sum over samples.
  add(sums, g, samples) {
    for (const [name, sum] of Object.entries(sums)) for (let i = 0; i < sum.length; i++) sum[i] += samples * g[name][i];
  }

  // What is handed over of such a sum: the mean, under the tensors' names; zeros where the model uses nothing of a tensor.
  means(sums, samples) {
    const slopes = Object.fromEntries(Object.entries(NAMES).map(([short, name]) => [name, sums[short]]));
    const mean = (name, data) => data.map((_, i) => (slopes[name] ? slopes[name][i] / samples : 0));
    return Object.fromEntries(Object.entries(this.tensors).map(([name, one]) => [name, { ...one, data: mean(name, one.data) }]));
  }

  // AdamW with clipping, Loshchilov and Hutter (arXiv 1711.05101); weight decay where a tensor has two axes and more.
  step(g, rate, config) {
    const norm = Math.sqrt(Object.values(g).reduce((sum, one) => sum + one.reduce((s, x) => s + x * x, 0), 0));
    const clip = config.clip_norm ? Math.min(1, config.clip_norm / (norm + 1e-6)) : 1;
    const [first, second] = config.betas;
    this.steps += 1;
    for (const [name, slope] of Object.entries(g)) {
      const moments = (this.moments[name] ??= [new Float64Array(slope.length), new Float64Array(slope.length)]);
      const decay = this.tensors[NAMES[name]].shape.length > 1 ? config.weight_decay : 0;
      for (let i = 0; i < slope.length; i++) {
        const one = slope[i] * clip;
        moments[0][i] += (1 - first) * (one - moments[0][i]);
        moments[1][i] += (1 - second) * (one * one - moments[1][i]);
        const root = Math.sqrt(moments[1][i] / (1 - second ** this.steps)) + config.epsilon;
        const value = this.w[name][i] * (1 - rate * decay);
        this.w[name][i] = value - (rate * (moments[0][i] / (1 - first ** this.steps))) / root;
      }
    }
    return norm;
  }
}
