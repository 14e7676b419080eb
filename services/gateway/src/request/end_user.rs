//! The end user of a client, by `safety_identifier` or `user`.

use sha2::{Digest, Sha256};

/// Hash of an end user's name. The name itself is kept nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EndUser([u8; 12]);

impl EndUser {
    fn of(name: &str) -> Self {
        let digest = Sha256::digest([b"refrain-end-user-v1:", name.as_bytes()].concat());
        let mut hash = [0; 12];
        hash.copy_from_slice(&digest[..12]);
        EndUser(hash)
    }

    /// The hash in hex.
    pub(crate) fn hex(self) -> String {
        hex::encode(self.0)
    }
}

/// The fields of a body that name an end user.
#[derive(Debug, Default)]
pub(super) struct EndUserFields {
    safety_identifier: Option<EndUser>,
    user: Option<EndUser>,
}

impl EndUserFields {
    /// Whether a field names an end user.
    pub(super) fn has(name: &str) -> bool {
        matches!(name, "safety_identifier" | "user")
    }

    /// Notes the value of such a field. One that is not text, or is empty, names nobody.
    pub(super) fn note(&mut self, field: &str, value: Option<&str>) {
        let user = value.filter(|name| !name.is_empty()).map(EndUser::of);
        match field {
            "safety_identifier" => self.safety_identifier = user,
            _ => self.user = user,
        }
    }

    /// The end user. `safety_identifier` is the newer name of `user`.
    pub(super) fn end_user(&self) -> Option<EndUser> {
        self.safety_identifier.or(self.user)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newer_field_counts_and_a_name_is_not_kept() {
        let mut fields = EndUserFields::default();
        assert_eq!(fields.end_user(), None);
        fields.note("user", Some("ann@example.com"));
        assert_eq!(fields.end_user(), Some(EndUser::of("ann@example.com")));
        fields.note("safety_identifier", Some("u-7"));
        assert_eq!(fields.end_user(), Some(EndUser::of("u-7")));
        fields.note("safety_identifier", Some(""));
        assert_eq!(fields.end_user(), Some(EndUser::of("ann@example.com")));
        let hex = EndUser::of("ann@example.com").hex();
        assert_eq!(hex.len(), 24);
        assert!(!format!("{fields:?}{hex}").contains("ann"));
    }
}
