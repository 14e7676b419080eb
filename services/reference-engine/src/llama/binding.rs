//! The calls of llama.cpp's C interface that the engine needs, behind types that end what they begin. All unsafe code
//! about it is here.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr::NonNull;

use anyhow::{Context as _, bail};
use llama_cpp_sys_2 as sys;
use refrain_protocol::TokenId;

use super::sequences::{Memory, Row};
use crate::backend::SequenceId;

/// Rows that the devices compute at once. Longer passes are computed in pieces.
const UBATCH_ROWS: u32 = 512;
/// Most sequences that llama.cpp knows.
const LLAMA_SEQUENCES_MAX: u32 = 256;

/// Sizes of a context.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ContextSizes {
    /// Tokens of keys and values.
    pub(crate) tokens: u32,
    /// Rows of a pass.
    pub(crate) rows: u32,
    pub(crate) threads: u32,
}

/// A loaded model.
#[derive(Debug)]
pub(crate) struct Model(NonNull<sys::llama_model>);

// SAFETY: llama.cpp only reads a loaded model, and its contexts are made from any thread.
unsafe impl Send for Model {}
// SAFETY: as above.
unsafe impl Sync for Model {}

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: the pointer is that of `load`, and contexts hold the model for as long as they live.
        unsafe { sys::llama_model_free(self.0.as_ptr()) }
    }
}

/// Passes a line of llama.cpp's log on. Its lines of information are many, and about the model only.
unsafe extern "C" fn log(level: sys::ggml_log_level, text: *const c_char, _: *mut c_void) {
    if text.is_null() {
        return;
    }
    // SAFETY: llama.cpp passes a text that ends with a zero.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    let text = text.trim_end();
    match level {
        sys::GGML_LOG_LEVEL_ERROR => tracing::error!(target: "llama.cpp", "{text}"),
        // This warning is about the sum of all texts, of which each is shorter.
        sys::GGML_LOG_LEVEL_WARN if text.contains("training context overflow") => {}
        sys::GGML_LOG_LEVEL_WARN => tracing::warn!(target: "llama.cpp", "{text}"),
        _ => tracing::debug!(target: "llama.cpp", "{text}"),
    }
}

/// Calls the closure behind `told` with the share that is loaded.
unsafe extern "C" fn progress(share: f32, told: *mut c_void) -> bool {
    // SAFETY: `Model::load` passes its reference to the closure, which outlives the load.
    let told = unsafe { &mut *told.cast::<&mut dyn FnMut(f32)>() };
    told(share);
    true
}

impl Model {
    /// Loads a file, with up to `gpu_layers` layers on an accelerator, or all without a number. `told` hears the
    /// share that is loaded.
    ///
    /// # Errors
    /// llama.cpp cannot load the file. Its log says why.
    pub(crate) fn load(
        path: &str,
        gpu_layers: Option<u32>,
        mut told: &mut dyn FnMut(f32),
    ) -> anyhow::Result<Self> {
        let text = CString::new(path).context("the path has a zero byte")?;
        // SAFETY: plain calls; the text and the closure outlive the load.
        let model = unsafe {
            sys::llama_log_set(Some(log), std::ptr::null_mut());
            sys::llama_backend_init();
            let mut params = sys::llama_model_default_params();
            params.n_gpu_layers =
                gpu_layers.map_or(-1, |layers| i32::try_from(layers).unwrap_or(-1));
            params.progress_callback = Some(progress);
            params.progress_callback_user_data = (&raw mut told).cast();
            sys::llama_model_load_from_file(text.as_ptr(), params)
        };
        let model = NonNull::new(model);
        Ok(Model(model.with_context(|| {
            format!("{path}: llama.cpp cannot load this file; its lines in the log say why")
        })?))
    }

    fn vocabulary(&self) -> *const sys::llama_vocab {
        // SAFETY: the model is alive.
        unsafe { sys::llama_model_get_vocab(self.0.as_ptr()) }
    }

    /// Number of tokens in the vocabulary.
    pub(crate) fn vocab_size(&self) -> u32 {
        // SAFETY: the vocabulary lives as long as the model.
        unsafe { sys::llama_vocab_n_tokens(self.vocabulary()) }.unsigned_abs()
    }

    /// Longest text for which the model was trained, in tokens.
    pub(crate) fn trained_context(&self) -> u32 {
        // SAFETY: the model is alive.
        unsafe { sys::llama_model_n_ctx_train(self.0.as_ptr()) }.unsigned_abs()
    }

    /// Why texts of this model cannot be cut and shared, if they cannot.
    pub(crate) fn fault(&self) -> Option<&'static str> {
        let model = self.0.as_ptr();
        // SAFETY: the model is alive.
        let (has_state, has_encoder, is_diffusion) = unsafe {
            (
                sys::llama_model_is_recurrent(model) || sys::llama_model_is_hybrid(model),
                sys::llama_model_has_encoder(model),
                sys::llama_model_is_diffusion(model),
            )
        };
        let faults = [
            (
                has_state,
                "its layers keep a state that cannot go back to an earlier token",
            ),
            (has_encoder, "it has an encoder"),
            (is_diffusion, "it does not write one token after the other"),
        ];
        let fault = faults.into_iter().find(|(is_fault, _)| *is_fault);
        fault.map(|(_, fault)| fault)
    }

    /// Number of llama.cpp's sequences that one of ours is.
    ///
    /// Where layers have a sliding window, llama.cpp overwrites tokens outside of it that belong to a single
    /// sequence. Another text may begin with them later, so there all tokens belong to two.
    fn copies(&self) -> u32 {
        // SAFETY: the model is alive.
        match unsafe { sys::llama_model_n_swa(self.0.as_ptr()) } {
            0 => 1,
            _ => 2,
        }
    }

    /// Maximum number of sequences of a context.
    pub(crate) fn sequences_max(&self) -> u32 {
        LLAMA_SEQUENCES_MAX / self.copies()
    }

    /// The tokens of a text, in which special tokens are not looked for.
    pub(crate) fn tokenize(&self, text: &str) -> Vec<TokenId> {
        let mut tokens = vec![0; text.len() + 8];
        // SAFETY: the lengths are those of the text and of the buffer.
        let count = unsafe {
            sys::llama_tokenize(
                self.vocabulary(),
                text.as_ptr().cast(),
                i32::try_from(text.len()).unwrap_or(i32::MAX),
                tokens.as_mut_ptr(),
                i32::try_from(tokens.len()).unwrap_or(i32::MAX),
                false,
                false,
            )
        };
        tokens.truncate(usize::try_from(count).unwrap_or(0));
        tokens.into_iter().map(i32::cast_unsigned).collect()
    }
}

/// The names of the accelerators that llama.cpp computes on.
pub(crate) fn accelerators() -> Vec<String> {
    // SAFETY: the index is below the count, and the names are constants of the devices.
    let names = (0..unsafe { sys::ggml_backend_dev_count() }).filter_map(|index| unsafe {
        let device = sys::ggml_backend_dev_get(index);
        let kind = sys::ggml_backend_dev_type(device);
        let is_cpu = [
            sys::GGML_BACKEND_DEVICE_TYPE_CPU,
            sys::GGML_BACKEND_DEVICE_TYPE_ACCEL,
        ]
        .contains(&kind);
        let name = sys::ggml_backend_dev_description(device);
        (!is_cpu && !name.is_null()).then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
    });
    names.collect()
}

/// A model with keys and values of its texts.
#[derive(Debug)]
pub(crate) struct Context {
    context: NonNull<sys::llama_context>,
    vocab_size: usize,
    rows_max: usize,
    copies: u32,
    /// Is freed after the context.
    _model: std::sync::Arc<Model>,
}

// SAFETY: llama.cpp has no state of a thread in a context; callers take turns.
unsafe impl Send for Context {}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the pointer is that of `new`, and nothing else has it.
        unsafe { sys::llama_free(self.context.as_ptr()) }
    }
}

impl Context {
    /// Reserves the memory of a context.
    ///
    /// # Errors
    /// There is too little memory.
    pub(crate) fn new(model: std::sync::Arc<Model>, sizes: ContextSizes) -> anyhow::Result<Self> {
        let threads = i32::try_from(sizes.threads).unwrap_or(i32::MAX);
        // SAFETY: plain calls on a model that is alive.
        let context = unsafe {
            let mut params = sys::llama_context_default_params();
            params.n_ctx = sizes.tokens;
            // llama.cpp reserves a row for each sequence.
            params.n_batch = sizes.rows.max(LLAMA_SEQUENCES_MAX);
            params.n_ubatch = sizes.rows.min(UBATCH_ROWS);
            params.n_seq_max = LLAMA_SEQUENCES_MAX;
            params.n_threads = threads;
            params.n_threads_batch = threads;
            // Sequences share the tokens of a common beginning.
            params.kv_unified = true;
            // Windows hide the tokens before them, which are kept, since a text may be cut or shared there.
            params.swa_full = true;
            params.no_perf = true;
            sys::llama_init_from_model(model.0.as_ptr(), params)
        };
        let Some(context) = NonNull::new(context) else {
            bail!(
                "llama.cpp cannot compute this model with {} tokens of keys and values; its lines in the log say why, and \
                 if it is the memory, lower engine.kv_tokens_max",
                sizes.tokens
            );
        };
        let context = Context {
            context,
            vocab_size: model.vocab_size() as usize,
            rows_max: sizes.rows as usize,
            copies: model.copies(),
            _model: model,
        };
        if context.memory().is_null() {
            bail!("this model keeps no keys and values, so it writes no texts");
        }
        Ok(context)
    }

    /// The sequences of llama.cpp that a sequence is.
    fn copies_of(&self, id: SequenceId) -> impl Iterator<Item = i32> + use<> {
        (id * self.copies..(id + 1) * self.copies).map(u32::cast_signed)
    }

    fn memory(&self) -> sys::llama_memory_t {
        // SAFETY: the context is alive.
        unsafe { sys::llama_get_memory(self.context.as_ptr()) }
    }

    /// Computes rows, and appends the wanted logits to `logits`.
    ///
    /// # Errors
    /// llama.cpp's.
    pub(crate) fn compute(&mut self, rows: &[Row], logits: &mut Vec<f32>) -> Result<(), String> {
        for piece in rows.chunks(self.rows_max) {
            let mut tokens: Vec<i32> = piece.iter().map(|row| row.token.cast_signed()).collect();
            let mut positions: Vec<i32> = piece.iter().map(|row| row.position as i32).collect();
            let mut sequences: Vec<Vec<i32>> = piece
                .iter()
                .map(|row| {
                    let copies = row.sequences.iter().flat_map(|id| self.copies_of(*id));
                    copies.collect()
                })
                .collect();
            let mut counts: Vec<i32> = sequences.iter().map(|ids| ids.len() as i32).collect();
            let mut sets: Vec<*mut i32> = sequences.iter_mut().map(Vec::as_mut_ptr).collect();
            let mut wanted: Vec<i8> = piece.iter().map(|row| i8::from(row.wants_logits)).collect();
            let batch = sys::llama_batch {
                n_tokens: piece.len() as i32,
                token: tokens.as_mut_ptr(),
                embd: std::ptr::null_mut(),
                pos: positions.as_mut_ptr(),
                n_seq_id: counts.as_mut_ptr(),
                seq_id: sets.as_mut_ptr(),
                logits: wanted.as_mut_ptr(),
            };
            // SAFETY: all arrays have as many elements as the batch has tokens, and outlive the call.
            match unsafe { sys::llama_decode(self.context.as_ptr(), batch) } {
                0 => {}
                1 => return Err("the keys and values of llama.cpp are full".into()),
                code => {
                    return Err(format!(
                        "llama.cpp ends with code {code}; its lines in the log say why"
                    ));
                }
            }
            for (row, _) in piece.iter().enumerate().filter(|(_, row)| row.wants_logits) {
                // SAFETY: the row was computed with logits, of which there is one for each token of the vocabulary.
                // They stay until the next call.
                let values = unsafe {
                    let values = sys::llama_get_logits_ith(self.context.as_ptr(), row as i32);
                    if values.is_null() {
                        return Err("llama.cpp has no logits of a row".into());
                    }
                    std::slice::from_raw_parts(values, self.vocab_size)
                };
                logits.extend_from_slice(values);
            }
        }
        Ok(())
    }
}

impl Memory for Context {
    fn share(&mut self, of: SequenceId, with: SequenceId, from: usize, end: usize) {
        for (of, with) in self.copies_of(of).zip(self.copies_of(with)) {
            // SAFETY: the memory lives as long as the context, and the ids are below its number of sequences.
            unsafe { sys::llama_memory_seq_cp(self.memory(), of, with, from as i32, end as i32) };
        }
    }

    fn drop_from(&mut self, sequence: SequenceId, from: usize) {
        for copy in self.copies_of(sequence) {
            // SAFETY: as above.
            let is_done = unsafe { sys::llama_memory_seq_rm(self.memory(), copy, from as i32, -1) };
            if !is_done {
                tracing::error!(sequence, from, "llama.cpp did not drop tokens of a text");
            }
        }
    }
}
