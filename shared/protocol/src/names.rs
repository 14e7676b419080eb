//! Names that people choose: they are shown in terminals, labels and logs, and tenants' are parts of namespaces.

use std::borrow::{Borrow, Cow};
use std::fmt;
use std::ops::Deref;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use unicode_general_category::{GeneralCategory, get_general_category};
use unicode_normalization_alignments::is_nfc;

/// Longest name of a tenant, a key or a model, bytes.
pub const NAME_BYTES_MAX: usize = 256;

/// Names that metrics give to tenants that they do not name.
pub const RESERVED_TENANTS: [&str; 3] = ["other", "none", "hidden"];

/// Whether a character shows nothing of its own, and can change how the text around it is shown or split.
pub fn is_invisible(character: char) -> bool {
    use GeneralCategory::{Control, Format, LineSeparator, ParagraphSeparator};
    let is_usual = (' '..='~').contains(&character);
    !is_usual
        && matches!(
            get_general_category(character),
            Control | Format | LineSeparator | ParagraphSeparator
        )
}

/// A text with its invisible characters as escapes, for a terminal.
pub fn shown(text: &str) -> Cow<'_, str> {
    if !text.contains(is_invisible) {
        return text.into();
    }
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        match is_invisible(character) {
            true => shown.extend(character.escape_default()),
            false => shown.push(character),
        }
    }
    shown.into()
}

/// The fault of a text as a name.
pub fn name_fault(text: &str) -> Option<String> {
    let rules = [
        (text.is_empty(), "must not be empty".to_owned()),
        (
            text.len() > NAME_BYTES_MAX,
            format!("must have at most {NAME_BYTES_MAX} bytes"),
        ),
        (
            text.trim() != text,
            "must not begin or end with a space".to_owned(),
        ),
        (
            text.contains(is_invisible),
            "must not have control characters, line breaks or invisible characters".to_owned(),
        ),
        (
            !is_nfc(text),
            "must be in Unicode's normal form NFC, so that equal names are the same bytes"
                .to_owned(),
        ),
    ];
    let mut broken = rules.into_iter().filter(|(is_broken, _)| *is_broken);
    broken.next().map(|(_, fault)| fault)
}

/// The name of a tenant. It keeps the rules of [`name_fault`], and is none of [`RESERVED_TENANTS`]. So it never has
/// the mark between a tenant and a part of it.
///
/// It is made once, where the name comes in. Names that were stored before stay texts, so that they can be read and
/// erased.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantName(Arc<str>);

impl FromStr for TenantName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(fault) = name_fault(text) {
            return Err(fault);
        }
        match RESERVED_TENANTS.contains(&text) {
            true => Err(format!(
                "{text} is reserved, since metrics use it; choose another name"
            )),
            false => Ok(TenantName(text.into())),
        }
    }
}

impl Deref for TenantName {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for TenantName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TenantName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for TenantName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

impl PartialEq<str> for TenantName {
    fn eq(&self, other: &str) -> bool {
        *self.0 == *other
    }
}

impl PartialEq<&str> for TenantName {
    fn eq(&self, other: &&str) -> bool {
        *self.0 == **other
    }
}

impl Serialize for TenantName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for TenantName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let name = text.parse();
        name.map_err(|fault| serde::de::Error::custom(format!("the name of a tenant {fault}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(text: &str) -> String {
        text.parse::<TenantName>().err().unwrap_or_default()
    }

    #[test]
    fn a_name_is_what_it_looks_like() {
        for name in [
            "acme",
            "a b",
            "Ünïcode",
            "日本",
            "other-2",
            "👩",
            "a:b/c",
            "a\u{a0}b",
        ] {
            assert_eq!(fault(name), "", "{name}");
        }
        for (name, part) in [
            ("", "empty"),
            (" a", "space"),
            ("a\u{3000}", "space"),
            ("a\n", "space"),
            ("acme\u{1f}key:1f", "control"),
            ("a\0b", "control"),
            ("a\u{1b}[31mb", "control"),
            ("a\u{7f}b", "control"),
            ("a\u{85}b", "control"),
            ("a\u{2028}b", "line breaks"),
            ("a\u{202e}b", "invisible"),
            ("a\u{200b}b", "invisible"),
            ("a\u{ad}b", "invisible"),
            ("\u{feff}a", "invisible"),
            ("e\u{301}", "NFC"),
            ("\u{212b}", "NFC"),
            ("other", "reserved"),
            ("none", "reserved"),
            ("hidden", "reserved"),
        ] {
            assert!(fault(name).contains(part), "{name:?}: {}", fault(name));
        }
        assert_eq!(fault(&"x".repeat(NAME_BYTES_MAX)), "");
        assert!(fault(&"x".repeat(NAME_BYTES_MAX + 1)).contains("256 bytes"));
    }

    #[test]
    fn a_name_is_a_text_for_serde_and_a_fault_says_what_it_is_about() {
        let name: TenantName = "acme".parse().unwrap();
        let json = serde_json::to_string(&name).unwrap();
        assert_eq!(json, "\"acme\"");
        assert_eq!(serde_json::from_str::<TenantName>(&json).unwrap(), name);
        let error = serde_json::from_str::<TenantName>("\"a\\u0000\"").unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("the name of a tenant must not"),
            "{error}"
        );
    }

    #[test]
    fn a_terminal_gets_escapes_in_place_of_what_would_paint_it() {
        assert_eq!(shown("evil\u{1b}[31mred\n"), "evil\\u{1b}[31mred\\n");
        assert_eq!(shown("a\u{202e}b"), "a\\u{202e}b");
        assert!(matches!(shown("Ünïcode"), Cow::Borrowed(_)));
    }
}
