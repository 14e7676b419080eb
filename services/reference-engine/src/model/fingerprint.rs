//! A hash of what a model computes with.

use xxhash_rust::xxh3::Xxh3;

use super::weights::Model;

impl Model {
    /// Returns a hash of the model's shape and of all its weights, as they lie in memory. Models with equal hashes
    /// compute the same bits. The two storage formats compute the same bits too, but have different hashes.
    /// The first call reads all weights, which takes seconds for a large model.
    pub(crate) fn fingerprint(&self) -> u128 {
        *self.fingerprint.get_or_init(|| self.hash())
    }

    fn hash(&self) -> u128 {
        let mut hash = Xxh3::new();
        hash.update(format!("{:?}", self.architecture).as_bytes());
        let mut floats = |floats: &[f32]| {
            hash.update(&(floats.len() as u64).to_le_bytes());
            hash.update(bytemuck::cast_slice(floats));
        };
        floats(&self.embedding);
        floats(&self.norm);
        for layer in &self.layers {
            floats(&layer.attention_norm);
            floats(&layer.block.mlp_norm);
            let bias = layer.block.query_key_value_bias.iter();
            bias.chain(layer.block.head_norms.iter().flatten())
                .for_each(|values| floats(values));
        }
        let of_layers = self.layers.iter().flat_map(|layer| {
            let block = &layer.block;
            [
                &block.query_key_value,
                &block.attention_out,
                &block.gate_up,
                &block.down,
            ]
        });
        for matrix in of_layers.chain([&self.head]) {
            matrix.hash_into(&mut hash);
        }
        hash.digest128()
    }
}

#[cfg(test)]
mod tests {
    use safetensors::Dtype;

    use crate::tests::support::{load, tensors, tiny_config};

    #[test]
    fn equal_models_have_equal_hashes_and_one_weight_makes_a_difference() {
        let config = tiny_config();
        let hash = |seed| {
            let model = load(&config, &tensors(&config, Dtype::F32, seed)).unwrap();
            model.fingerprint()
        };
        assert_eq!(hash(1), hash(1));
        assert_ne!(hash(1), hash(2));
        let mut other = config.clone();
        other["rope_theta"] = 77.0.into();
        let model = load(&other, &tensors(&other, Dtype::F32, 1)).unwrap();
        assert_ne!(model.fingerprint(), hash(1));
    }
}
