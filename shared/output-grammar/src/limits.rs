//! The limits of compiling and matching.

/// The limits of compiling and matching.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrammarLimits {
    /// Maximum number of bytes of a form's texts.
    pub form_bytes_max: usize,
    /// Maximum number of bytes of a grammar in Lark or EBNF.
    pub grammar_bytes_max: usize,
    /// Deepest nesting of a JSON schema.
    pub schema_depth_max: usize,
    /// Maximum number of subschemas of a JSON schema.
    pub subschemas_max: usize,
    /// Work that building a grammar's automaton may take, in units of which a core does about 50,000 per millisecond.
    pub compile_fuel: u64,
    /// Maximum number of symbols of a grammar.
    pub symbols_max: usize,
    /// Work that one mask may take, in units of which a core does about 14,000 per millisecond.
    pub mask_fuel: u64,
    /// Maximum number of states of the automaton of one output, each of 1 to 2 kB. A string with a `maxLength` takes
    /// one for each of its characters, so the default allows strings of 16,000 characters, and takes at most 40 MB
    /// for an output.
    pub states_max: usize,
    /// Maximum number of items of the parser in the row after a token: the rules that are open or end there, each
    /// counted from every place where it may have begun. Rules that end in themselves have an item for each
    /// repetition.
    pub row_items_max: usize,
    /// Maximum number of items of the rows that one mask tries.
    pub mask_items_max: usize,
    /// Work of the parser that the masks of one output may take. A row with n items counts n times n, of which a core
    /// does about 1,000,000 per millisecond where the grammar is not ambiguous.
    pub output_work_max: u64,
    /// Maximum number of bytes of compiled grammars that are kept. With 0, only the verdicts are.
    pub cached_bytes_max: usize,
    /// Maximum number of verdicts that are kept. One takes about 200 bytes.
    pub verdicts_max: usize,
    /// Maximum number of threads that compile forms and follow costly outputs. A tenant has half of them, and one at
    /// least.
    pub threads_max: usize,
    /// Maximum number of forms that wait to be compiled. A tenant may have a quarter of them.
    pub waiting_forms_max: usize,
}

impl Default for GrammarLimits {
    fn default() -> Self {
        GrammarLimits {
            form_bytes_max: 256 << 10,
            grammar_bytes_max: 64 << 10,
            schema_depth_max: 64,
            subschemas_max: 3_000,
            compile_fuel: 1_000_000,
            symbols_max: 200_000,
            mask_fuel: 200_000,
            states_max: 20_000,
            row_items_max: 2_000,
            mask_items_max: 50_000,
            output_work_max: 300_000_000,
            cached_bytes_max: 64 << 20,
            verdicts_max: 4_096,
            threads_max: 2,
            waiting_forms_max: 64,
        }
    }
}
