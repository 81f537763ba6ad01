//! The state in a file of this host: a `redb` database, which is whole after a crash at any moment.

use super::{StateError, StateStore};
use redb::{Database, DatabaseError, TableDefinition, TableError};
use std::path::{Path, PathBuf};

const TABLE: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("coordinator");
const STATE: &str = "state";

/// The file, which no other process can open meanwhile.
#[derive(Debug)]
pub(crate) struct FileStore {
    database: Database,
    path: PathBuf,
}

impl FileStore {
    pub(crate) fn open(path: &Path) -> Result<FileStore, StateError> {
        let fault = |error: &dyn std::fmt::Display| {
            StateError(format!("the coordinator's state cannot be kept in {}: {error}", path.display()))
        };
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder).map_err(|error| fault(&error))?;
        }
        match Database::create(path) {
            Ok(database) => Ok(FileStore { database, path: path.to_owned() }),
            Err(DatabaseError::DatabaseAlreadyOpen) => Err(StateError(format!(
                "{} is used by another coordinator; is the job running already? Give each job its own --state",
                path.display()
            ))),
            Err(error) => Err(fault(&error)),
        }
    }

    fn fault(&self, error: &dyn std::fmt::Display) -> StateError {
        StateError(format!("{}: {error}", self.path.display()))
    }

    fn write(&self, state: Option<&[u8]>) -> Result<(), Box<dyn std::error::Error>> {
        let transaction = self.database.begin_write()?;
        {
            let mut table = transaction.open_table(TABLE)?;
            match state {
                Some(state) => table.insert(STATE, state)?,
                None => table.remove(STATE)?,
            };
        }
        transaction.commit()?;
        Ok(())
    }

    fn read(&self) -> Result<Option<Vec<u8>>, Box<dyn std::error::Error>> {
        let transaction = self.database.begin_read()?;
        let table = match transaction.open_table(TABLE) {
            Err(TableError::TableDoesNotExist(_)) => return Ok(None),
            table => table?,
        };
        Ok(table.get(STATE)?.map(|state| state.value().to_vec()))
    }
}

impl StateStore for FileStore {
    fn load(&mut self) -> Result<Option<Vec<u8>>, StateError> {
        self.read().map_err(|error| self.fault(&error))
    }

    fn store(&mut self, state: &[u8]) -> Result<(), StateError> {
        self.write(Some(state)).map_err(|error| self.fault(&error))
    }

    fn remove(&mut self) -> Result<(), StateError> {
        self.write(None).map_err(|error| self.fault(&error))?;
        std::fs::remove_file(&self.path).map_err(|error| self.fault(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_found_by_the_next_process_until_it_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("below").join("state");
        let mut store = FileStore::open(&path).unwrap();
        assert_eq!(store.load(), Ok(None));
        for state in [&[1, 2][..], &[3]] {
            store.store(state).unwrap();
            assert_eq!(store.load(), Ok(Some(state.to_vec())));
        }
        let why = FileStore::open(&path).unwrap_err().to_string();
        assert!(why.contains("another coordinator"), "{why}");
        drop(store);
        let mut store = FileStore::open(&path).unwrap();
        assert_eq!(store.load(), Ok(Some(vec![3])));
        store.remove().unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn a_file_that_is_something_else_is_refused_with_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notes");
        std::fs::write(&path, "x".repeat(10_000)).unwrap();
        let why = FileStore::open(&path).unwrap_err().to_string();
        assert!(why.contains("notes"), "{why}");
    }
}
