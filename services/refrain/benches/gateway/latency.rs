//! The time that a process adds to an answer, measured so that a busy machine does not drown it.
//!
//! Threads send questions by plain sockets at random times, since a runtime's timers have steps of a millisecond and
//! would send several questions at once. Rounds are short, and each goes through all processes and to the engine
//! itself. The result is the difference within a round, as the median over the rounds.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use crate::quantile;

/// Threads that send, each with a connection of its own.
const SENDERS: usize = 8;

/// A process that is asked.
pub(crate) struct Asked {
    pub(crate) name: &'static str,
    /// Host and port.
    address: String,
}

/// The times of one round's answers, milliseconds.
struct RoundTimes {
    p50: f64,
    p99: f64,
}

impl Asked {
    pub(crate) fn new(name: &'static str, url: &str) -> Self {
        Asked {
            name,
            address: url.trim_start_matches("http://").to_owned(),
        }
    }

    /// Sends these bodies at `per_s` in all.
    fn round(&self, bodies: &[Vec<u8>], per_s: f64, seed: u64) -> anyhow::Result<RoundTimes> {
        let mean_s = SENDERS as f64 / per_s;
        let times: Vec<f64> = thread::scope(|scope| {
            let shares = bodies.chunks(bodies.len().div_ceil(SENDERS));
            let senders: Vec<_> = (seed..)
                .zip(shares)
                .map(|(seed, share)| scope.spawn(move || self.send(share, mean_s, seed)))
                .collect();
            let joined = senders.into_iter().map(|sender| {
                let sent = sender.join().ok().context("a sender panicked")?;
                sent.context(self.name)
            });
            joined.collect::<anyhow::Result<Vec<_>>>()
        })?
        .concat();
        Ok(RoundTimes {
            p50: quantile(&times, 0.5),
            p99: quantile(&times, 0.99),
        })
    }

    /// Sends bodies one after the other, with random pauses of `mean_s` on average between their beginnings.
    fn send(&self, bodies: &[Vec<u8>], mean_s: f64, seed: u64) -> anyhow::Result<Vec<f64>> {
        let mut connection = TcpStream::connect(&self.address)?;
        connection.set_nodelay(true)?;
        let mut state = seed;
        let mut times = Vec::with_capacity(bodies.len());
        let mut due = Instant::now();
        for body in bodies {
            due += Duration::from_secs_f64(mean_s * 2.0 * unit(&mut state));
            thread::sleep(due.saturating_duration_since(Instant::now()));
            let head = format!(
                "POST /v1/chat/completions HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\n\
                 content-length: {}\r\n\r\n",
                self.address,
                body.len()
            );
            let request = [head.as_bytes(), body].concat();
            let sent = Instant::now();
            connection.write_all(&request)?;
            read_answer(&mut connection)?;
            times.push(sent.elapsed().as_secs_f64() * 1e3);
        }
        Ok(times)
    }
}

/// A random number from 0 to 1.
fn unit(state: &mut u64) -> f64 {
    *state = state
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    (*state >> 11) as f64 / (1u64 << 53) as f64
}

/// Reads a successful answer, whose length its head tells.
fn read_answer(connection: &mut TcpStream) -> anyhow::Result<()> {
    let mut answer = Vec::new();
    let mut buffer = [0; 8 << 10];
    loop {
        let read = connection.read(&mut buffer)?;
        ensure!(read > 0, "the connection was closed");
        answer.extend_from_slice(&buffer[..read]);
        let text = std::str::from_utf8(&answer)?;
        let Some((head, body)) = text.split_once("\r\n\r\n") else {
            continue;
        };
        ensure!(head.starts_with("HTTP/1.1 200"), "{text}");
        let length = head.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            let is_length = name.eq_ignore_ascii_case("content-length");
            is_length.then(|| value.trim().parse::<usize>().ok())?
        });
        let is_whole = match length {
            Some(length) => body.len() >= length,
            None => body.ends_with("0\r\n\r\n"),
        };
        if is_whole {
            return Ok(());
        }
    }
}

/// Asks all in turns at this rate, and prints the times that all but the first add to those of the first. `bodies`
/// makes those of a round.
pub(crate) fn measure(
    all: &[Asked],
    per_s: f64,
    rounds: usize,
    mut bodies: impl FnMut() -> Vec<Vec<u8>>,
) -> anyhow::Result<()> {
    let mut added: Vec<[Vec<f64>; 2]> = vec![<[Vec<f64>; 2]>::default(); all.len()];
    for round in 0..rounds {
        let bodies = bodies();
        let mut times = Vec::new();
        for asked in all {
            times.push(asked.round(&bodies, per_s, round as u64)?);
        }
        for (times_of, added) in times.iter().zip(&mut added) {
            added[0].push(times_of.p50 - times[0].p50);
            added[1].push(times_of.p99 - times[0].p99);
        }
    }
    for (asked, [p50, p99]) in all.iter().zip(&added).skip(1) {
        println!(
            "  at {per_s:.0}/s, {:<4}: added p50 {:.3} ms, p99 {:.3} ms (quarters of the rounds: {:.3} to {:.3}, {:.3} to {:.3})",
            asked.name,
            quantile(p50, 0.5),
            quantile(p99, 0.5),
            quantile(p50, 0.25),
            quantile(p50, 0.75),
            quantile(p99, 0.25),
            quantile(p99, 0.75),
        );
    }
    Ok(())
}
