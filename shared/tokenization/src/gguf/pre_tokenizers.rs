//! The pre-tokenizers of byte-level vocabularies, by their names in GGUF files.
//!
//! A file has only the name. The patterns are those of the models' own tokenizers. Where llama.cpp writes them in
//! another way for its engine of regular expressions, the original is taken here.

/// The way in which a model splits text into words before it merges bytes.
pub(super) struct PreTokenizer {
    /// Regular expressions. Each one splits the pieces that the one before it leaves.
    pub(super) patterns: &'static [&'static str],
    /// Whether a word that is a token is not built by merges.
    pub(super) ignores_merges: bool,
    /// Whether a sequence begins with a token, if the file does not say it.
    pub(super) adds_bos: bool,
}

/// The pattern of GPT-2, which the byte-level pre-tokenizer knows itself.
pub(super) const GPT2: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const MINICPM5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SEED_CODER: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
const BAILING: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";
const DEEPSEEK3_WORDS: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const DEEPSEEK_LETTERS: &str = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";

/// A pre-tokenizer with these patterns and nothing else.
const fn split(patterns: &'static [&'static str]) -> PreTokenizer {
    PreTokenizer {
        patterns,
        ignores_merges: false,
        adds_bos: false,
    }
}

/// A pre-tokenizer of a model whose sequences begin with a token, and whose words may be tokens as they are.
const fn begun(patterns: &'static [&'static str]) -> PreTokenizer {
    PreTokenizer {
        patterns,
        ignores_merges: true,
        adds_bos: true,
    }
}

impl PreTokenizer {
    /// The pre-tokenizer of this name, as llama.cpp groups them.
    ///
    /// # Errors
    /// The name is not known here.
    pub(super) fn of(name: &str) -> Result<Self, String> {
        Ok(match name {
            "default" => split(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
            "gpt-2" | "phi-2" | "jina-es" | "jina-de" | "jina-v1-en" | "jina-v2-es"
            | "jina-v2-de" | "jina-v2-code" | "roberta-bpe" | "modern-bert" | "gigachat"
            | "a.x-4.0" | "mellum" | "exaone4" | "mpt" | "olmo" | "jais" | "trillion"
            | "granite-docling" => split(&[GPT2]),
            "starcoder" | "refact" | "command-r" | "smollm" | "codeshell" | "exaone"
            | "minerva-7b" | "mellum2" => split(&[r"\p{N}", GPT2]),
            "falcon" => split(&[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"]),
            "dbrx" | "smaug-bpe" | "chatglm-bpe" => split(&[LLAMA3]),
            "glm4" | "glm5" => PreTokenizer {
                ignores_merges: true,
                ..split(&[LLAMA3])
            },
            "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral"
            | "midm-2.0" | "lfm2" | "jina-v5-nano" => begun(&[LLAMA3]),
            "qwen2" | "deepseek-r1-qwen" | "kormo" | "f2llmv2" | "megrez" | "stablelm2"
            | "hunyuan" | "solar-open" | "grok-2" => split(&[QWEN2]),
            "qwen35" => split(&[QWEN35]),
            "laguna" => split(&[r"[^\n]+|[\n]+", QWEN2]),
            "minicpm5" => PreTokenizer {
                ignores_merges: true,
                ..split(&[r"\p{N}{1,3}", MINICPM5])
            },
            "seed-coder" => split(&[SEED_CODER]),
            "exaone-moe" => split(&[EXAONE_MOE]),
            "bailingmoe" | "bailingmoe2" | "llada-moe" => split(&[BAILING]),
            "gpt-4o" | "llama4" | "kanana2" | "talkie" | "minimax-m2" => split(&[GPT4O]),
            "tiny_aya" | "cohere2moe" => split(&[r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O]),
            "tekken" => begun(&[TEKKEN]),
            "bloom" | "poro-chat" | "gpt3-finnish" => split(&[BLOOM]),
            "viking" => split(&[BLOOM, r"\p{N}"]),
            "deepseek-llm" => split(&[
                r"[\r\n]",
                DEEPSEEK_LETTERS,
                r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
                r"\s+$",
                "[一-龥ࠀ-一가-퟿]+",
                r"\p{N}+",
            ]),
            "deepseek-coder" => split(&[
                r"[\r\n]",
                r"\s?\p{L}+",
                r"\s?\p{P}+",
                "[一-龥ࠀ-一가-퟿]+",
                r"\p{N}",
            ]),
            "deepseek-v3" | "hunyuan-dense" | "joyai-llm" | "hy_v4" => {
                split(&[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3_WORDS])
            }
            _ => {
                return Err(format!(
                    "its pre-tokenizer {name:?} (tokenizer.ggml.pre) is not supported; use the model's folder with \
                     tokenizer.json instead"
                ));
            }
        })
    }
}
