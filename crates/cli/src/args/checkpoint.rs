//! The options about checkpoints, shared by the commands that start servers.

use crate::duration::Span;
use crate::output::Output;
use anyhow::Result;
use clap::Args as ClapArgs;
use paramill_core::checkpoint::{self, CheckpointPolicy, Every};
use paramill_core::coordinator::Checkpointing;
use paramill_core::limits;
use paramill_node::checkpoint::{self as checkpoint_files, Archive, Place, Survey};
use std::path::PathBuf;

/// Checkpoints as they were typed.
#[derive(Debug, Clone, Default, ClapArgs)]
pub(crate) struct CheckpointArgs {
    /// Keep checkpoints in this folder: of every server's own machine, or shared by them; or below s3://BUCKET/PREFIX. Every server
    /// needs it.
    #[arg(long, value_name = "DIR", help_heading = "Checkpoints")]
    pub(crate) checkpoint: Option<PathBuf>,
    /// Make one every so many steps (500), or when so much time has passed (30s) [default: when asked, and when the job ends].
    #[arg(long, value_name = "N|TIME", value_parser = parse_every, requires = "checkpoint", help_heading = "Checkpoints")]
    pub(crate) every: Option<Every>,
    /// Keep the newest so many [default: 3].
    #[arg(long, value_name = "N", requires = "checkpoint", help_heading = "Checkpoints",
          value_parser = clap::value_parser!(u32).range(1..=limits::MAX_CHECKPOINTS as i64))]
    pub(crate) keep: Option<u32>,
    /// Go on from the newest complete one in DIR, if there is one; or from FILE, which `paramill checkpoint URL FILE` has written, and
    /// every server needs.
    #[arg(long, value_name = "FILE", num_args = 0..=1, help_heading = "Checkpoints")]
    pub(crate) resume: Option<Option<PathBuf>>,
}

impl CheckpointArgs {
    /// Refuses what has no meaning, before anything is started.
    pub(crate) fn check(&self) -> Result<()> {
        anyhow::ensure!(
            self.resume != Some(None) || self.checkpoint.is_some(),
            "--resume goes on from the newest checkpoint in a folder: give --checkpoint DIR too, or a file (--resume FILE)"
        );
        // A folder is made later, by whoever uses it.
        if let Some(path) = self.checkpoint.as_ref().filter(|path| path.to_string_lossy().contains("://")) {
            Archive::open(path)?;
        }
        Ok(())
    }

    /// Where a server has its checkpoints.
    pub(crate) fn place(&self) -> Result<Place> {
        self.check()?;
        let archive = self.checkpoint.as_ref().map(Archive::open).transpose()?;
        Ok(Place::new(archive, self.file().cloned()))
    }

    /// The file that the job goes on from.
    pub(crate) fn file(&self) -> Option<&PathBuf> {
        self.resume.as_ref().and_then(Option::as_ref)
    }

    /// What the coordinator of a job does with the archive. What was passed over is told.
    pub(crate) fn checkpointing(&self, job: &str, output: &Output) -> Result<Option<Checkpointing>> {
        self.check()?;
        let copy = self.file().map(|path| checkpoint_files::open(path, job)).transpose()?;
        let archive = match &self.checkpoint {
            Some(path) => Archive::open(path)?,
            None => {
                return Ok(copy.map(|copy| Checkpointing { policy: None, resume: Some(copy), kept: vec![] }));
            }
        };
        let is_resumed = self.resume == Some(None);
        let Survey { newest, kept, passed_over } = archive.survey(job)?;
        passed_over.into_iter().for_each(|sentence| output.note(sentence));
        if is_resumed && newest.is_none() {
            output.note(format!(
                "{} has no complete checkpoint: the job begins anew",
                archive.path().display()
            ));
        }
        let resume = copy.or(newest.filter(|_| is_resumed));
        let (every, keep) = (self.every.unwrap_or(Every::Asked), self.keep.unwrap_or(checkpoint::KEEP));
        Ok(Some(Checkpointing { policy: Some(CheckpointPolicy { every, keep }), resume, kept }))
    }

    /// The same options for the first server of a job, in a process of its own.
    pub(crate) fn of_first(&self) -> Vec<String> {
        let mut arguments = self.of_others();
        arguments.extend(self.every.map(|every| match every {
            Every::Steps(steps) => format!("--every={steps}"),
            Every::Time(time) => format!("--every={}", Span(time)),
            Every::Asked => "--every=never".into(),
        }));
        arguments.extend(self.keep.map(|keep| format!("--keep={keep}")));
        arguments.extend((self.resume == Some(None)).then(|| "--resume".into()));
        arguments
    }

    /// The options for servers that join it.
    pub(crate) fn of_others(&self) -> Vec<String> {
        let folder = self.checkpoint.iter().map(|path| format!("--checkpoint={}", path.display()));
        folder.chain(self.file().map(|path| format!("--resume={}", path.display()))).collect()
    }
}

/// `500` are steps, `30s` is a time.
fn parse_every(text: &str) -> Result<Every, String> {
    match (text.parse::<u64>(), text.parse::<Span>()) {
        _ if text == "never" => Ok(Every::Asked),
        (Ok(steps), _) if steps > 0 => Ok(Every::Steps(steps)),
        (_, Ok(Span(time))) if !time.is_zero() => Ok(Every::Time(time)),
        _ => Err(format!("`{text}`: expected a number of steps such as 500, or a time such as 30s")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_number_is_steps_and_a_duration_time() {
        assert_eq!(parse_every("500"), Ok(Every::Steps(500)));
        assert_eq!(parse_every("30s"), Ok(Every::Time(Duration::from_secs(30))));
        assert_eq!(parse_every("never"), Ok(Every::Asked));
        for text in ["0", "0s", "", "often", "-1"] {
            assert!(parse_every(text).unwrap_err().contains("such as 500"), "{text}");
        }
    }

    #[test]
    fn another_process_gets_the_same_options() {
        let args = CheckpointArgs {
            checkpoint: Some("a b".into()),
            every: Some(Every::Time(Duration::from_secs(90))),
            keep: Some(2),
            resume: Some(None),
        };
        assert_eq!(args.of_first(), ["--checkpoint=a b", "--every=90s", "--keep=2", "--resume"]);
        assert_eq!(args.of_others(), ["--checkpoint=a b"]);
        let copied = CheckpointArgs { resume: Some(Some("c d".into())), ..CheckpointArgs::default() };
        assert_eq!([copied.of_first(), copied.of_others()], [["--resume=c d"], ["--resume=c d"]]);
        let nowhere = CheckpointArgs { resume: Some(None), ..CheckpointArgs::default() };
        assert!(nowhere.check().is_err() && copied.check().is_ok() && args.check().is_ok());
        assert!(CheckpointArgs::default().of_first().is_empty());
    }

    #[test]
    fn a_url_is_refused_before_anything_is_started_where_it_cannot_be_used() {
        let refusal = |url: &str| {
            let args = CheckpointArgs { checkpoint: Some(url.into()), ..CheckpointArgs::default() };
            args.check().unwrap_err().to_string()
        };
        let why = refusal("ftp://host/job");
        #[cfg(feature = "object-store")]
        assert!(
            why.contains("ftp://host/job") && why.contains("expected a folder, s3://BUCKET/PREFIX"),
            "{why}"
        );
        #[cfg(not(feature = "object-store"))]
        assert!(why.contains("the cargo feature `object-store`"), "{why}");
        let why = refusal("file://folder");
        assert!(why.contains("expected file:///FOLDER"), "{why}");
    }
}
