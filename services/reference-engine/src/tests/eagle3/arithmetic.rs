//! Tests of a head's logits against a plain computation of its formulas in f64.

use std::collections::HashMap;
use std::sync::Arc;

use refrain_protocol::TokenId;
use safetensors::Dtype;
use serde_json::{Value, json};

use super::{Reading, captured_width, head_config, head_tensors, load_head};
use crate::tests::support::{Random, VOCAB, tiny};
use crate::tests::weight_files::FileTensor;

/// A head, computed directly by its formulas.
struct Naive {
    tensors: HashMap<String, Vec<f64>>,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    theta: f64,
    norm_before_residual: bool,
}

/// A computed row.
#[derive(Clone)]
struct Row {
    position: usize,
    key: Vec<f64>,
    value: Vec<f64>,
    output: Vec<f64>,
    logits: Vec<f64>,
}

impl Naive {
    fn new(config: &Value, tensors: &HashMap<String, FileTensor>) -> Self {
        let size = |key: &str| config[key].as_u64().unwrap() as usize;
        Naive {
            tensors: tensors
                .iter()
                .filter(|(name, _)| name.ends_with(".weight"))
                .map(|(name, tensor)| {
                    let values = tensor.values();
                    (name.clone(), values.into_iter().map(f64::from).collect())
                })
                .collect(),
            heads: size("num_attention_heads"),
            kv_heads: size("num_key_value_heads"),
            head_dim: size("head_dim"),
            theta: config["rope_theta"].as_f64().unwrap(),
            norm_before_residual: config["norm_before_residual"] == json!(true),
        }
    }

    fn times(&self, name: &str, x: &[f64]) -> Vec<f64> {
        self.tensors[name]
            .chunks(x.len())
            .map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum())
            .collect()
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (mean + 1e-5).sqrt();
        let weights = &self.tensors[name];
        weights.iter().zip(x).map(|(w, x)| w * x * scale).collect()
    }

    fn turn(&self, x: &mut [f64], position: usize) {
        let half = self.head_dim / 2;
        for head in x.chunks_mut(self.head_dim) {
            for i in 0..half {
                let angle = position as f64 * self.theta.powf(-(i as f64) / half as f64);
                let (a, b) = (head[i], head[i + half]);
                head[i] = a * angle.cos() - b * angle.sin();
                head[i + half] = b * angle.cos() + a * angle.sin();
            }
        }
    }

    /// Computes a row. `hidden` is the output of fc or of the parent, and `seen` are all earlier rows that it sees.
    fn row(&self, hidden: &[f64], token: TokenId, position: usize, seen: &[Row]) -> Row {
        let size = hidden.len();
        let embedded: Vec<f64> = match self.tensors.get("embed_tokens.weight") {
            Some(own) => own[token as usize * size..][..size].to_vec(),
            None => tiny().embedding[token as usize * size..][..size]
                .iter()
                .map(|x| f64::from(*x))
                .collect(),
        };
        let mut read = self.norm("midlayer.input_layernorm.weight", &embedded);
        let normed = self.norm("midlayer.hidden_norm.weight", hidden);
        read.extend(&normed);
        let mut query = self.times("midlayer.self_attn.q_proj.weight", &read);
        let mut key = self.times("midlayer.self_attn.k_proj.weight", &read);
        let value = self.times("midlayer.self_attn.v_proj.weight", &read);
        self.turn(&mut query, position);
        self.turn(&mut key, position);
        let mut row = Row {
            position,
            key,
            value,
            output: Vec::new(),
            logits: Vec::new(),
        };
        let all: Vec<&Row> = seen.iter().chain([&row]).collect();
        let mut mixed = Vec::new();
        for (head, query) in query.chunks(self.head_dim).enumerate() {
            let shared = head / (self.heads / self.kv_heads) * self.head_dim;
            let scores: Vec<f64> = all
                .iter()
                .map(|row| {
                    let key = &row.key[shared..][..self.head_dim];
                    let score: f64 = query.iter().zip(key).map(|(q, k)| q * k).sum();
                    (score / (self.head_dim as f64).sqrt()).exp()
                })
                .collect();
            let total: f64 = scores.iter().sum();
            for i in 0..self.head_dim {
                let sum: f64 = all
                    .iter()
                    .zip(&scores)
                    .map(|(row, score)| score / total * row.value[shared + i])
                    .sum();
                mixed.push(sum);
            }
        }
        let residual = if self.norm_before_residual {
            &normed
        } else {
            hidden
        };
        let attended = self.times("midlayer.self_attn.o_proj.weight", &mixed);
        let x: Vec<f64> = residual.iter().zip(&attended).map(|(x, y)| x + y).collect();
        let inner = self.norm("midlayer.post_attention_layernorm.weight", &x);
        let gated: Vec<f64> = self
            .times("midlayer.mlp.gate_proj.weight", &inner)
            .iter()
            .zip(self.times("midlayer.mlp.up_proj.weight", &inner))
            .map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up)
            .collect();
        let mlp = self.times("midlayer.mlp.down_proj.weight", &gated);
        row.output = x.iter().zip(&mlp).map(|(x, y)| x + y).collect();
        row.logits = self.times("lm_head.weight", &self.norm("norm.weight", &row.output));
        row
    }
}

fn close(found: &[f32], truth: &[f64], what: &str) {
    assert_eq!(found.len(), truth.len(), "{what}");
    for (id, (found, truth)) in found.iter().zip(truth).enumerate() {
        assert!(
            (f64::from(*found) - truth).abs() < 1e-4 * (1.0 + truth.abs()),
            "{what}: logit {id} is {found}, not {truth}"
        );
    }
}

fn check(config: &Value, tensors: &HashMap<String, FileTensor>) {
    let mut random = Random(5);
    let naive = Naive::new(config, tensors);
    let head = Arc::new(load_head(config, tensors).unwrap());
    // Texts that end in the first block, that are longer, and whose beginning the head has not read.
    for (len, first) in [(2, 0), (37, 0), (70, 21)] {
        let text = random.tokens(len);
        let mut reading = Reading::new(tiny(), head.clone(), &text);
        let width = captured_width(&head, &tiny());
        let mut rows: Vec<Row> = Vec::new();
        for position in first..len - 1 {
            let states: Vec<f64> = reading.captured[position * width..][..width]
                .iter()
                .map(|x| f64::from(*x))
                .collect();
            let fused = naive.times("fc.weight", &states);
            rows.push(naive.row(&fused, text[position + 1], position - first, &rows));
        }
        let truth = &rows[rows.len() - 1];
        close(&reading.follow(&text, first, 19), &truth.logits, "text");

        // Two levels, and a third one below one node.
        let nodes = random.tokens(7);
        let parents = [None, None, None, Some(0), Some(0), Some(2), Some(4)];
        let mut found = reading.guess(&nodes[..3], &parents[..3], 0);
        found.extend(reading.guess(&nodes[..6], &parents[..6], 3));
        found.extend(reading.guess(&nodes, &parents, 6));
        let mut tree: Vec<(Row, Vec<Row>)> = Vec::new();
        for (node, parent) in parents.iter().enumerate() {
            let (above, mut seen) = match parent {
                None => (truth.clone(), rows.clone()),
                Some(parent) => tree[*parent as usize].clone(),
            };
            let row = naive.row(&above.output, nodes[node], above.position + 1, &seen);
            close(&found[node], &row.logits, &format!("node {node}"));
            seen.push(row.clone());
            tree.push((row, seen));
        }
    }
}

#[test]
fn the_published_layout() {
    let config = head_config();
    check(&config, &head_tensors(&config, 3));
}

#[test]
fn norm_before_residual() {
    let mut config = head_config();
    config["norm_before_residual"] = json!(true);
    check(&config, &head_tensors(&config, 4));
}

#[test]
fn one_captured_layer_and_an_embedding_of_its_own() {
    let mut config = head_config();
    config["eagle_config"] = json!({"eagle_aux_hidden_state_layer_ids": [1]});
    let mut tensors = head_tensors(&config, 5);
    let shape = [VOCAB as usize, tiny().architecture.hidden_size];
    let rows = head_tensors(&config, 6)["lm_head.weight"].values();
    let values: Vec<f32> = rows.into_iter().cycle().take(shape[0] * shape[1]).collect();
    let embedding = FileTensor::floats(Dtype::F32, &shape, &values);
    tensors.insert("embed_tokens.weight".into(), embedding);
    check(&config, &tensors);
}

#[test]
fn captured_states_are_the_outputs_of_layers() {
    let mut config = head_config();
    config["eagle_config"] = json!({"eagle_aux_hidden_state_layer_ids": [1, 0]});
    let head = Arc::new(load_head(&config, &head_tensors(&config, 5)).unwrap());
    let text = Random(8).tokens(40);
    let reading = Reading::new(tiny(), head, &text);
    let target = tiny();
    let hidden = target.architecture.hidden_size;
    // After the last of its two layers, the target has only its norm and its head.
    let last = &reading.captured[38 * 2 * hidden..][..hidden];
    let mut normed = vec![0.0; hidden];
    crate::kernels::rms_norm(last, &target.norm, 1e-5, &mut normed);
    let mut logits = Vec::new();
    target.head.product(&normed, 1, &mut logits, 1);
    assert_eq!(
        logits[..target.architecture.vocab_size],
        reading.target_logits
    );
    assert_ne!(
        last,
        &reading.captured[38 * 2 * hidden + hidden..][..hidden]
    );
}
