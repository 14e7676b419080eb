//! The file that keeps the engines over restarts of the process.

use std::io::Write as _;
use std::path::Path;

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

/// The content of the file.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    /// The base URLs of the engines.
    engines: Vec<String>,
}

/// Reads the URLs. A file that does not exist has none.
///
/// # Errors
/// It cannot be read, or has something else.
pub(super) fn read(path: &Path) -> anyhow::Result<Vec<String>> {
    let name = || format!("worker.adoption.file = {}", path.display());
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.with_context(name)?,
    };
    let record: Record = serde_json::from_str(&text).with_context(name)?;
    Ok(record.engines)
}

/// Writes the URLs, all or nothing.
///
/// # Errors
/// The folder cannot be written to.
pub(super) fn write(path: &Path, engines: Vec<String>) -> std::io::Result<()> {
    let text = serde_json::to_vec_pretty(&Record { engines })?;
    let beside = path.with_extension("new");
    let mut file = std::fs::File::create(&beside)?;
    file.write_all(&text)?;
    file.sync_all()?;
    std::fs::rename(&beside, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_has_the_engines_that_were_written_last() {
        let folder = std::env::temp_dir().join(format!("refrain-record-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("engines.json");
        assert!(read(&path).unwrap().is_empty());
        for urls in [
            vec!["http://a:1".to_owned(), "http://b:2".to_owned()],
            vec![],
        ] {
            write(&path, urls.clone()).unwrap();
            assert_eq!(read(&path).unwrap(), urls);
        }
        std::fs::write(&path, "not JSON").unwrap();
        let error = format!("{:#}", read(&path).unwrap_err());
        assert!(error.contains("worker.adoption.file"), "{error}");
        assert!(write(&folder.join("none/engines.json"), Vec::new()).is_err());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
