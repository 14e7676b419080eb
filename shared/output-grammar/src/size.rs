//! The memory of a compiled grammar.

use std::collections::HashSet;
use std::mem::size_of;

use llguidance::TokenParser;
use llguidance::earley::{CGrammar, CSymIdx, ParamExpr};

/// Bytes of a parser apart from its tables.
const BASE_BYTES: usize = 4 << 10;

/// Bytes of a symbol's name, flags and lists, apart from its rules.
const SYMBOL_BYTES: usize = 320;

/// Bytes of a terminal: its regular expression as a tree, and its names.
const LEXEME_BYTES: usize = 400;

/// About the bytes of a parser that has read nothing. The library counts those of the automaton; those of the rules
/// are estimated from their number. A test compares the sum with what the allocator gave.
pub(crate) fn parser_bytes(parser: &TokenParser) -> usize {
    let grammar = parser.parser.grammar();
    let spec = grammar.lexer_spec();
    // The automaton begins as a copy of the expressions of the grammar.
    let expressions = spec.regex_builder.exprset().num_bytes();
    let automaton = parser.parser.lexer_stats().num_bytes;
    let lexemes = spec.lexemes.len() * LEXEME_BYTES;
    let text = parser.dbg_grammar.len();
    BASE_BYTES + expressions + automaton + lexemes + text + rule_bytes(grammar)
}

/// The bytes of all symbols and rules.
fn rule_bytes(grammar: &CGrammar) -> usize {
    // An element has its symbol, its parameter, and its place in three lists.
    let element = size_of::<CSymIdx>() + size_of::<ParamExpr>() + 2;
    let mut bytes = 0;
    let mut open = vec![grammar.start()];
    let mut seen: HashSet<CSymIdx> = open.iter().copied().collect();
    while let Some(symbol) = open.pop() {
        bytes += SYMBOL_BYTES + grammar.sym_name(symbol).len();
        for rule in grammar.rules_of(symbol) {
            let (elements, _, _) = grammar.rule_rhs(*rule);
            bytes += (elements.len() + 1) * element + size_of::<u32>();
            open.extend(elements.iter().filter(|next| seen.insert(**next)));
        }
    }
    bytes
}
