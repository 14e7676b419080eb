//! Texts on which two libraries that encode text would differ first: what pre-tokenizers split, what normalizers
//! compose, and what added tokens interrupt.

/// Words, numbers, blanks and punctuation that the patterns of pre-tokenizers treat in special ways.
const LATIN: &str = "The quick brown fox's 12345 jumps; they'll say \"HELLO\" -- don't we'RE I'm it'S\n\n\n  \t\r\n\
    def f(x):\n        return x**2 + 0x1F - 3.14e-10  # n\u{b0} 1\u{bd}\n   trailing   \n \
    CamelCaseWords snake_case_words kebab-case https://example.org/a?b=c&d=%20 {\"key\": [1, 2.5, null]} \
    aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa ===== ////// ...... \u{a0}\u{2003}\u{3000}x";

/// Scripts with several bytes, combining marks, and characters that NFC composes or leaves out.
const SCRIPTS: &str = "Gr\u{fc}\u{df}e na\u{ef}ve caf\u{e9} cafe\u{301} A\u{30a} \u{212b} \u{1100}\u{1161}\u{11a8} \
    \u{ac01} \u{d55c}\u{ad6d}\u{c5b4} \u{4f60}\u{597d}\u{ff0c}\u{4e16}\u{754c}\u{3002}\u{3053}\u{3093}\u{306b} \
    \u{41f}\u{440}\u{438}\u{432}\u{435}\u{442} \u{645}\u{631}\u{62d}\u{628}\u{627} \u{661}\u{662}\u{663} \
    \u{928}\u{92e}\u{938}\u{94d}\u{924}\u{947} \u{e2a}\u{e27}\u{e31}\u{e2a} \u{1f980}\u{1f469}\u{200d}\u{1f4bb} \
    \u{1f1e9}\u{1f1ea} \u{fb01} \u{2126} \u{1e9b}\u{323} \u{958} \u{2028}\u{85}\u{0}\u{7f}\u{feff}\u{fffd}\u{f0000}";

/// The texts to compare, given the texts of the added tokens.
pub(super) fn texts<'a>(added: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut texts = vec![LATIN.to_owned(), SCRIPTS.to_owned(), String::new()];
    // Added tokens alone, within words, between blanks, and cut off.
    let mut marked = String::new();
    for (number, token) in added.enumerate() {
        let (space, word) = [("", "a"), (" ", "B "), ("\n", " 7"), ("  ", "\u{e9}")][number % 4];
        marked.extend([word, space, token, space]);
        marked.extend(token.chars().take(token.chars().count() / 2));
    }
    texts.push(marked);
    texts.push([LATIN, SCRIPTS].concat().repeat(3));
    texts
}
