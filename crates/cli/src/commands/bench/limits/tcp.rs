//! Loopback TCP: as many connections as an exchange has, between as many processes, with nothing done to the bytes.

use super::super::fleet::Fleet;
use super::super::plan::Exchange;
use super::super::task::{Answer, Instruction, Task, answer, next_instruction};
use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
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

/// The task of a server process: it listens as often as a server has data cores.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in super::super) struct Sink {
    listeners: u32,
    /// Connections to each.
    connections: u32,
    link: Link,
}

/// The task of a worker process: it connects to every data core.
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
    /// Memory that each connection sends from, and as much that it receives into, again and again.
    region: usize,
}

/// Bytes per second that reach somebody, in all, over the connections of this exchange: one way or both ways at once,
/// whichever is more.
pub(in super::super) fn flow(exchange: &Exchange, time: Duration) -> Result<f64> {
    let one = measure(exchange, time, Ways::One, BUFFER)?;
    Ok(one.max(measure(exchange, time, Ways::Both, BUFFER)?))
}

/// The same for bytes that come from memory and go to memory, as gradients and parameters do: each worker sends as much
/// as the model has before it begins again, and both ways at once.
pub(in super::super) fn flow_from_memory(exchange: &Exchange, time: Duration) -> Result<f64> {
    let connections = u64::from(exchange.servers) * u64::from(exchange.cores);
    let region = (exchange.elements() * 4).div_ceil(connections) as usize;
    measure(exchange, time, Ways::Both, region)
}

fn measure(exchange: &Exchange, time: Duration, ways: Ways, region: usize) -> Result<f64> {
    let mut fleet = Fleet::new();
    let link = Link { ways, time, congestion: exchange.congestion.clone(), region };
    let sink = Sink { listeners: exchange.cores, connections: exchange.workers, link: link.clone() };
    let mut sinks = Vec::new();
    for number in 0..exchange.servers {
        sinks.push((fleet.start(format!("sink {number}"), &Task::Sink(sink.clone()))?, 1));
    }
    let addresses = fleet.answers(&sinks, "address", DEADLINE, |answer| match answer {
        Answer::Listening { addresses } => Some(addresses),
        _ => None,
    })?;
    let source = Source { addresses: addresses.concat(), link };
    let mut sources = Vec::new();
    for number in 0..exchange.workers {
        sources.push((fleet.start(format!("source {number}"), &Task::Source(source.clone()))?, 1));
    }
    fleet.answers(&sources, "word that it is connected", DEADLINE, |answer| match answer {
        Answer::Ready { .. } => Some(()),
        _ => None,
    })?;
    fleet.order(sources.iter().map(|(process, _)| *process), Instruction::Flow { time })?;
    let all: Vec<(usize, usize)> = sinks.into_iter().chain(sources).collect();
    let flowed = fleet.answers(&all, "count of bytes", DEADLINE + 10 * time, |answer| match answer {
        Answer::Flowed { bytes, seconds } => Some((bytes, seconds)),
        _ => None,
    })?;
    fleet.await_end()?;
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
        match next_instruction()? {
            Instruction::Flow { .. } => self.link.carry(streams, true),
            Instruction::Leave => Ok(()),
            Instruction::Run { .. } => bail!("a source was told to iterate"),
        }
    }
}

impl Link {
    /// Receives on all connections until they end, and sends on them for the time if it is to.
    fn carry(&self, streams: Vec<TcpStream>, send: bool) -> Result<()> {
        let mut receiving = Vec::new();
        let mut sending = Vec::new();
        for stream in streams {
            stream.set_read_timeout(Some(DEADLINE))?;
            stream.set_write_timeout(Some(DEADLINE))?;
            if send {
                let (stream, region, time) = (stream.try_clone()?, self.region, self.time);
                sending.push(std::thread::spawn(move || send_for(stream, region, time)));
            } else {
                stream.shutdown(Shutdown::Write)?;
            }
            let region = self.region;
            receiving.push(std::thread::spawn(move || receive(stream, region)));
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

fn receive(mut stream: TcpStream, region: usize) -> Result<Option<Received>> {
    let mut buffer = vec![1u8; region];
    let mut received: Option<Received> = None;
    let mut at = 0;
    loop {
        let end = region.min(at + BUFFER);
        let count = stream.read(&mut buffer[at..end]).context("loopback TCP stopped")?;
        if count == 0 {
            return Ok(received);
        }
        at = (at + count) % region;
        let now = Instant::now();
        let received = received.get_or_insert(Received { bytes: 0, first: now, last: now });
        received.bytes += count as u64;
        received.last = now;
    }
}

fn send_for(mut stream: TcpStream, region: usize, time: Duration) -> Result<()> {
    // Zeros would be one page of memory that is mapped many times, and never leaves the nearest cache.
    let data = vec![1u8; region];
    let began = Instant::now();
    for piece in data.chunks(BUFFER).cycle().take_while(|_| began.elapsed() < time) {
        stream.write_all(piece).context("loopback TCP stopped")?;
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
