//! Identifiers. Those of 128 bits are 32 lower-case hex digits in JSON and 16 bytes in bincode.

use std::fmt;
use std::str::FromStr;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

macro_rules! hex_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
        pub struct $name(pub u128);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:032x}", self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({:032x})", stringify!($name), self.0)
            }
        }

        impl FromStr for $name {
            type Err = String;
            fn from_str(text: &str) -> Result<Self, String> {
                if text.len() != 32 {
                    return Err(format!("expected 32 hex digits, got {} characters", text.len()));
                }
                u128::from_str_radix(text, 16).map($name).map_err(|error| error.to_string())
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                if serializer.is_human_readable() {
                    serializer.collect_str(self)
                } else {
                    self.0.serialize(serializer)
                }
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                if deserializer.is_human_readable() {
                    let text = String::deserialize(deserializer)?;
                    text.parse().map_err(D::Error::custom)
                } else {
                    u128::deserialize(deserializer).map($name)
                }
            }
        }
    };
}

hex_id! {
    /// The hash of a namespace (see [`crate::Namespace::id`]). Drafts never cross namespaces.
    NamespaceId
}
hex_id! {
    /// The hash of a tenant's name (see [`TenantId::of`]), by which engines know it. Zero: nobody said.
    TenantId
}
hex_id! {
    /// The id of an output, complete or growing: one choice of one request.
    DocumentId
}
hex_id! {
    /// The id of one choice of a client request, from its first lease to its last token. The gateway draws it at
    /// random.
    RequestId
}
hex_id! {
    /// The id of a lease, which gives one worker to one request for one chunk.
    LeaseId
}
hex_id! {
    /// The id of a session inside an engine: a text with its KV cache. The caller of the engine draws it at random.
    EngineSessionId
}

impl From<RequestId> for DocumentId {
    /// The document of a request has the same number, on every worker that continues it.
    fn from(request: RequestId) -> Self {
        DocumentId(request.0)
    }
}

/// The name of a worker. It is unique in the mesh, and survives restarts if the deployment gives the worker a fixed
/// name.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WorkerId(pub String);

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_ids_round_trip_through_json() {
        let id = DocumentId(0x0123);
        let json = serde_json::to_string(&id).unwrap();
        assert_eq!(json, "\"00000000000000000000000000000123\"");
        assert_eq!(serde_json::from_str::<DocumentId>(&json).unwrap(), id);
        assert!(serde_json::from_str::<DocumentId>("\"12\"").is_err());
    }
}
