//! Loopback TCP: as many connections as an exchange has, between as many processes, with nothing done to the bytes.

use super::super::crew::Crew;
use super::super::part::{Answer, Order, Part, answer, next_order};
use super::super::plan::Exchange;
use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes in a system call: so many that calls cost next to nothing, and more than the nearest caches hold.
const BUFFER: usize = 4 << 20;
const DEADLINE: Duration = Duration::from_secs(20);

/// In which directions bytes travel on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(in super::super) enum Ways {
    One,
    Both,
}

/// The part of a server process: it listens as often as a server has data cores.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in super::super) struct Sink {
    listeners: u32,
    /// Connections to each.
    connections: u32,
    link: Link,
}

/// The part of a worker process: it connects to every data core.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in super::super) struct Source {
    addresses: Vec<String>,
    link: Link,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Link {
    ways: Ways,
    time: Duration,
    congestion: String,
}

/// Bytes per second that reach somebody, in all, over the connections of this exchange: one way or both ways at once,
/// whichever is more.
pub(in super::super) fn flow(exchange: &Exchange, time: Duration) -> Result<f64> {
    let one = measure(exchange, time, Ways::One)?;
    Ok(one.max(measure(exchange, time, Ways::Both)?))
}

fn measure(exchange: &Exchange, time: Duration, ways: Ways) -> Result<f64> {
    let mut crew = Crew::new();
    let link = Link { ways, time, congestion: exchange.congestion.clone() };
    let sink = Sink { listeners: exchange.cores, connections: exchange.workers, link: link.clone() };
    let mut sinks = Vec::new();
    for number in 0..exchange.servers {
        sinks.push((crew.start(format!("sink {number}"), &Part::Sink(sink.clone()))?, 1));
    }
    let addresses = crew.answers(&sinks, "address", DEADLINE, |answer| match answer {
        Answer::Listening { addresses } => Some(addresses),
        _ => None,
    })?;
    let source = Source { addresses: addresses.concat(), link };
    let mut sources = Vec::new();
    for number in 0..exchange.workers {
        sources.push((crew.start(format!("source {number}"), &Part::Source(source.clone()))?, 1));
    }
    crew.answers(&sources, "word that it is connected", DEADLINE, |answer| match answer {
        Answer::Ready { .. } => Some(()),
        _ => None,
    })?;
    crew.order(sources.iter().map(|(process, _)| *process), Order::Flow { time })?;
    let all: Vec<(usize, usize)> = sinks.into_iter().chain(sources).collect();
    let flowed = crew.answers(&all, "count of bytes", DEADLINE + 10 * time, |answer| match answer {
        Answer::Flowed { bytes, seconds } => Some((bytes, seconds)),
        _ => None,
    })?;
    crew.await_end()?;
    let bytes: u64 = flowed.iter().map(|(bytes, _)| bytes).sum();
    let seconds = flowed.iter().map(|(_, seconds)| *seconds).fold(0.0, f64::max);
    if seconds <= 0.0 {
        bail!("no byte came through loopback TCP in {:.1} s", time.as_secs_f64());
    }
    Ok(bytes as f64 / seconds)
}

impl Sink {
    /// Listens, and takes what comes until every connection has ended.
    pub(in super::super) fn run(&self) -> Result<()> {
        let listeners = (0..self.listeners)
            .map(|_| listen(&self.link.congestion))
            .collect::<Result<Vec<TcpListener>>>()?;
        let addresses =
            listeners.iter().map(|listener| Ok(listener.local_addr()?.to_string())).collect::<Result<_>>()?;
        answer(&Answer::Listening { addresses })?;
        let mut streams = Vec::new();
        for listener in &listeners {
            for _ in 0..self.connections {
                streams.push(listener.accept()?.0);
            }
        }
        self.link.carry(streams, self.link.ways == Ways::Both)
    }
}

impl Source {
    /// Connects, waits for the word, and sends for a time.
    pub(in super::super) fn run(&self) -> Result<()> {
        let streams = self
            .addresses
            .iter()
            .map(|address| connect(address.parse()?, &self.link.congestion))
            .collect::<Result<Vec<TcpStream>>>()?;
        answer(&Answer::Ready { held: None })?;
        match next_order()? {
            Order::Flow { .. } => self.link.carry(streams, true),
            Order::Leave => Ok(()),
            Order::Run { .. } => bail!("a source was told to iterate"),
        }
    }
}

impl Link {
    /// Receives on all connections until they end, and sends on them for the time if it is to.
    fn carry(&self, streams: Vec<TcpStream>, send: bool) -> Result<()> {
        // Zeros would be one page of memory that is mapped many times, and never leaves the nearest cache.
        let data = Arc::new(vec![1u8; BUFFER]);
        let mut receiving = Vec::new();
        let mut sending = Vec::new();
        for stream in streams {
            stream.set_read_timeout(Some(DEADLINE))?;
            stream.set_write_timeout(Some(DEADLINE))?;
            if send {
                let (stream, data, time) = (stream.try_clone()?, data.clone(), self.time);
                sending.push(std::thread::spawn(move || send_for(stream, &data, time)));
            } else {
                stream.shutdown(Shutdown::Write)?;
            }
            receiving.push(std::thread::spawn(move || receive(stream)));
        }
        let joined = |_| anyhow!("a thread panicked");
        sending.into_iter().try_for_each(|thread| thread.join().map_err(joined)?)?;
        let (mut bytes, mut first, mut last) = (0, None, None);
        for thread in receiving {
            let Some(received) = thread.join().map_err(joined)?? else { continue };
            bytes += received.bytes;
            first = first.min(Some(received.first)).or(Some(received.first));
            last = last.max(Some(received.last));
        }
        let seconds = match (first, last) {
            (Some(first), Some(last)) => (last - first).as_secs_f64(),
            _ => 0.0,
        };
        answer(&Answer::Flowed { bytes, seconds })
    }
}

struct Received {
    bytes: u64,
    first: Instant,
    last: Instant,
}

fn receive(mut stream: TcpStream) -> Result<Option<Received>> {
    let mut buffer = vec![0u8; BUFFER];
    let mut received: Option<Received> = None;
    loop {
        let count = stream.read(&mut buffer).context("loopback TCP stopped")?;
        if count == 0 {
            return Ok(received);
        }
        let now = Instant::now();
        let received = received.get_or_insert(Received { bytes: 0, first: now, last: now });
        received.bytes += count as u64;
        received.last = now;
    }
}

fn send_for(mut stream: TcpStream, data: &[u8], time: Duration) -> Result<()> {
    let began = Instant::now();
    while began.elapsed() < time {
        stream.write_all(data).context("loopback TCP stopped")?;
    }
    Ok(stream.shutdown(Shutdown::Write)?)
}

fn listen(congestion: &str) -> Result<TcpListener> {
    let socket = socket(congestion)?;
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
    socket.listen(1024)?;
    Ok(socket.into())
}

fn connect(address: SocketAddr, congestion: &str) -> Result<TcpStream> {
    let socket = socket(congestion)?;
    socket.connect_timeout(&address.into(), DEADLINE)?;
    Ok(socket.into())
}

/// Connections that a listener accepts have its congestion control.
fn socket(congestion: &str) -> Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket
        .set_tcp_congestion(congestion.as_bytes())
        .with_context(|| format!("cannot have congestion control {congestion}"))?;
    Ok(socket)
}
