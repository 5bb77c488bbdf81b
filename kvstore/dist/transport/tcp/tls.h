// TLS 1.3 over a connected socket, by OpenSSL: both ends show a certificate and verify the other's.
//
// The handshake of tls.cc comes before that of handshake.h, whose bytes are the first that go
// through. Encrypting copies: bytes that a Write has taken are encrypted and belong to the stream,
// which keeps those that the socket does not take (`unsent`), 64 KiB at most.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <sys/types.h>
#include <sys/uio.h>

#include "base/mutex.h"

struct ssl_ctx_st;  // of OpenSSL, whose headers stay in tls.cc
struct ssl_st;

namespace heddle::kvstore::dist {

// Files in PEM.
struct TlsOptions {
  std::string certificate;  // of this process, then those of the authorities between; empty: no TLS
  std::string key;          // of that certificate, without a passphrase
  std::string authorities;  // who may have signed the certificates of others
  // What certificates of all peers are for; empty: those of who listens are for the host that is
  // connected to, those of who connects for anything.
  std::string name;

  bool enabled() const { return !certificate.empty(); }
};

// Whether a stranger's first byte begins TLS.
inline bool BeginsTls(std::byte first) { return first == std::byte{0x16}; }

// As of a call to the system.
struct Transferred {
  ssize_t bytes = 0;
  int error = 0;  // if bytes is -1
};

// Threads: Shake before all others; then Read by one at a time, and Write by one at a time; these
// two wait for one another.
class TlsStream {
 public:
  enum class State { kGoing, kOpen, kFailed };
  static constexpr std::size_t kRecordBytes = 16 << 10;  // of plain text, at most

  // Takes the handshake as far as the socket allows; while it is kGoing it goes on when the socket
  // can be read.
  State Shake();

  // As readv on a socket that does not block; EPROTO: why() says it. Fewer bytes than there is room
  // for: that was all.
  Transferred Read(const iovec* runs, std::size_t count) EXCLUDES(mutex_);
  // As writev. Without runs it sends what is unsent.
  Transferred Write(const iovec* runs, std::size_t count) EXCLUDES(mutex_);
  // Encrypted bytes that the socket has not taken: wait until it can be written to, and Write.
  bool unsent() const { return unsent_.load(std::memory_order_relaxed); }
  // Tells the peer that nothing more comes; Write must follow while anything is unsent.
  void Finish() EXCLUDES(mutex_);

  // What went wrong, in words that make sense behind "<peer>: ". Never speaks of keys.
  std::string why() const EXCLUDES(mutex_);
  // It was TLS that failed, or a certificate, rather than the connection.
  bool refused() const EXCLUDES(mutex_);

 private:
  friend class TlsContext;
  struct SslFree {
    void operator()(ssl_st* ssl) const;
  };

  TlsStream(ssl_st* ssl, int fd, std::string expected_name);

  Transferred ReadLocked(char* to, std::size_t bytes) REQUIRES(mutex_);
  bool EncryptLocked(const char* from, std::size_t bytes) REQUIRES(mutex_);
  // 0, or as errno.
  int SendLocked() REQUIRES(mutex_);
  // After a call of OpenSSL returned `result`: as errno, 0 for an end in order.
  int ErrorLocked(int result) REQUIRES(mutex_);
  int EndLocked() const REQUIRES(mutex_);
  std::string ExplainLocked() const REQUIRES(mutex_);

  const int fd_;
  const std::string expected_name_;  // empty: any
  mutable Mutex mutex_;
  const std::unique_ptr<ssl_st, SslFree> ssl_;  // writes to encrypted_
  std::vector<char> encrypted_ GUARDED_BY(mutex_);
  std::size_t sent_ GUARDED_BY(mutex_) = 0;  // of encrypted_
  int failed_ GUARDED_BY(mutex_) = 0;        // as errno
  // Likewise, of sending: the socket says why once, and not to who reads.
  int send_failed_ GUARDED_BY(mutex_) = 0;
  std::string why_ GUARDED_BY(mutex_);
  std::atomic<bool> unsent_{false};  // written under mutex_
};

// What the streams of a process have in common. Threads: any.
class TlsContext {
 public:
  // Reads the files. InvalidArgument, naming option and file, for what cannot be read or does not
  // fit together.
  explicit TlsContext(const TlsOptions& options);

  // Over a socket that does not block, stays open as long as the stream, and has been connected to
  // `host`.
  std::unique_ptr<TlsStream> Connecting(int fd, const std::string& host) const;
  std::unique_ptr<TlsStream> Accepting(int fd) const;

  // Why others with the same authorities will not accept the certificate today, such as "has
  // expired"; or empty.
  std::string OwnProblem() const;

 private:
  struct ContextFree {
    void operator()(ssl_ctx_st* context) const;
  };

  const TlsOptions options_;
  const std::unique_ptr<ssl_ctx_st, ContextFree> context_;
};

}  // namespace heddle::kvstore::dist
