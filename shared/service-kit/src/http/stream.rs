//! The stream below HTTP: an admitted connection, in clear or under TLS.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::server::TlsStream;

use super::connections::{AdmittedStream, ConnectionGuard};

/// A connection of a listener.
pub(super) enum ListenerStream {
    Plain(AdmittedStream),
    Tls(Box<TlsStream<AdmittedStream>>),
}

impl ListenerStream {
    pub(super) fn connection(&self) -> Arc<ConnectionGuard> {
        match self {
            ListenerStream::Plain(stream) => stream.connection(),
            ListenerStream::Tls(stream) => stream.get_ref().0.connection(),
        }
    }
}

impl AsyncRead for ListenerStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            ListenerStream::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            ListenerStream::Tls(stream) => Pin::new(&mut **stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for ListenerStream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            ListenerStream::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            ListenerStream::Tls(stream) => Pin::new(&mut **stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            ListenerStream::Plain(stream) => Pin::new(stream).poll_flush(context),
            ListenerStream::Tls(stream) => Pin::new(&mut **stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            ListenerStream::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            ListenerStream::Tls(stream) => Pin::new(&mut **stream).poll_shutdown(context),
        }
    }
}
