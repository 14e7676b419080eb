//! Step times of the model, compared with published and measured figures.

use super::*;

fn preset(name: &str) -> EngineModel {
    EngineModel::load(name).expect("a preset")
}

fn ms(name: &str, requests: usize, tokens: usize, context: usize) -> f64 {
    let load = StepLoad::decoding(requests, tokens, requests * context);
    preset(name).step_seconds(load) * 1e3
}

#[test]
fn plain_decoding_takes_what_was_published() {
    // vLLM on an H200, Spec-Bench, ms per token at 1, 4, 16 and 64 requests.
    for (requests, published) in [(1, 5.53), (4, 5.78), (16, 6.73), (64, 10.36)] {
        let modelled = ms("h200-8b", requests, requests, 500);
        let off = modelled / published - 1.0;
        assert!(off.abs() < 0.06, "{requests}: {modelled} for {published}");
    }
    // One pass over the weights at the printed bandwidth is the least that any of them can take.
    for Preset {
        name,
        engine: model,
    } in presets().expect("the file is part of the binary")
    {
        model.check().expect("a preset that makes sense");
        let least = model.weights_gb / model.bandwidth_tb_per_s;
        let plain = ms(&name, 1, 1, 0);
        assert!(
            plain > least && plain < 1.6 * least + model.step_us / 1e3 + 0.1,
            "{name}: {plain}"
        );
    }
}

#[test]
fn an_h100_takes_what_was_measured() {
    // Requests, tokens of each, and ms: a forward pass as a CUDA graph, contexts of 500 tokens.
    for (requests, each, measured) in [
        (1, 1, 6.88),
        (1, 9, 7.31),
        (1, 17, 7.38),
        (16, 1, 7.40),
        (16, 5, 8.05),
        (16, 9, 8.60),
        (16, 17, 10.57),
        (64, 1, 8.74),
        (64, 5, 12.76),
        (64, 9, 19.00),
        (64, 17, 32.72),
        // SGLang's plain steps.
        (1, 1, 6.45),
        (16, 1, 7.00),
        (64, 1, 8.56),
    ] {
        let modelled = ms("h100-8b-measured", requests, requests * each, 500);
        let off = modelled / measured - 1.0;
        assert!(
            off.abs() < 0.09,
            "{requests} of {each}: {modelled} for {measured}"
        );
    }
}

#[test]
fn tokens_are_nearly_free_up_to_the_ridge_and_climb_in_stairs_after_it() {
    let at = |tokens| ms("h100-8b", 1, tokens, 0);
    // The ridge of 8 B parameters in bf16: 989 * 0.6 / (3.35 * 0.8) = 221 tokens.
    assert!(at(192) < 1.15 * at(1), "{} {}", at(192), at(1));
    let stairs: Vec<f64> = [256, 257, 320, 321].map(at).to_vec();
    let token = 0.005;
    assert!(stairs[1] - stairs[0] > 1.0, "{stairs:?}");
    assert!(
        (stairs[2] - stairs[1] - 63.0 * token).abs() < 1e-9,
        "{stairs:?}"
    );
    assert!((stairs[3] - stairs[2] - (stairs[1] - stairs[0])).abs() < 1e-9);
    assert!((1..2000).all(|tokens| at(tokens) < at(tokens + 1)));
}

#[test]
fn contexts_are_read() {
    // 2 * 32 layers * 8 heads * 128 * 2 bytes = 128 KiB per token, at 2.68 TB/s.
    let added = ms("h100-8b", 1, 1, 1_000_000) - ms("h100-8b", 1, 1, 0);
    assert!((added - 131_072.0 * 1e6 / 2.68e12 * 1e3).abs() < 1e-9);
    let idle = preset("h100-8b");
    assert_eq!(idle.step_seconds(StepLoad::default()), 0.0);
}

#[test]
fn a_file_has_the_keys_of_the_struct() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("engine.toml");
    let name = path.to_str().expect("a path in UTF-8");
    let least = "weights_gb = 16.06\nparameters_b = 8.03\nkv_bytes_per_token = 131072\n\
                 bandwidth_tb_per_s = 3.35\ncompute_tflop_per_s = 989\n";
    std::fs::write(&path, least)?;
    assert_eq!(EngineModel::load(name)?, preset("h100-8b"));
    for (text, wanted) in [
        ("weights_gb = 1", "missing field"),
        (&format!("{least}speed = 1"), "unknown field `speed`"),
        (
            &format!("{least}tile_tokens = 0"),
            "tile_tokens must be at least 1, not 0",
        ),
        (
            &format!("{least}bandwidth_efficiency = 1.5"),
            "at most 1, not 1.5",
        ),
        (
            &least.replace("16.06", "-1"),
            "weights_gb must be more than 0, not -1",
        ),
        (
            &least.replace("16.06", "nan"),
            "weights_gb must be more than 0, not NaN",
        ),
    ] {
        std::fs::write(&path, text)?;
        let error = format!("{:#}", EngineModel::load(name).expect_err(text));
        assert!(
            error.contains(wanted) && error.contains("engine.toml"),
            "{error}"
        );
    }
    let error = format!(
        "{:#}",
        EngineModel::load("h1-8b").expect_err("no such model")
    );
    assert!(
        error.contains("h1-8b") && error.contains("h100-8b-measured, h200-8b"),
        "{error}"
    );
    Ok(())
}

#[test]
fn latent_attention_of_drafts_is_limited_by_arithmetic() {
    let attending = |name: &str, queries: usize| {
        let with = ms(name, 16, 16 * queries, 20_000);
        with - ms(name, 16, 16 * queries, 0)
    };
    // With grouped queries, nine tokens are read as one is. With latent attention and 64 heads, they are computed.
    let ratio = |name| attending(name, 9) / attending(name, 1);
    assert!((ratio("h800x8-qwen2vl-72b") - 1.0).abs() < 1e-9);
    assert!(ratio("h800-kimi-k2-rank") > 4.0);
    assert!(ratio("h800-moonlight") > 1.1);
}
