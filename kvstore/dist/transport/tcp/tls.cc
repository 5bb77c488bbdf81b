#include "kvstore/dist/transport/tcp/tls.h"

#include <heddle/error.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>

#include "base/check.h"

namespace heddle::kvstore::dist {
namespace {

// What one Write takes: with more an urgent message would wait longer behind what is encrypted.
constexpr std::size_t kWriteBytes = 128 << 10;
// What one read of the socket takes.
constexpr std::size_t kReadBytes = 128 << 10;

// The last error that OpenSSL has noted on this thread, in words.
std::string LastError() {
  const char* const reason = ERR_reason_error_string(ERR_peek_last_error());
  return reason != nullptr ? reason : "no reason given";
}

[[noreturn]] void ThrowBadFile(const char* field, const char* variable, const std::string& path,
                               const std::string& expected) {
  // Files that cannot be opened leave an error of the system.
  const auto code = ERR_peek_error();
  const std::string why =
      ERR_SYSTEM_ERROR(code) ? std::strerror(ERR_GET_REASON(code)) : LastError();
  throw InvalidArgument(
      fmt::format("{}: expected {}, given '{}' ({}): {}", field, expected, path, variable, why));
}

// Nobody is asked for a passphrase.
int NoPassphrase(char* /*buffer*/, int /*size*/, int /*writing*/, void* /*data*/) { return -1; }

// Where a stream's SSL writes to: the end of a vector, whose memory serves again and again.
int AppendToVector(BIO* bio, const char* data, int bytes) {
  auto* const to = static_cast<std::vector<char>*>(BIO_get_data(bio));
  to->insert(to->end(), data, data + bytes);
  return bytes;
}
long ControlOfVector(BIO* /*bio*/, int command, long /*number*/, void* /*pointer*/) {
  return command == BIO_CTRL_FLUSH ? 1 : 0;
}
BIO* NewVectorBio(std::vector<char>* to) {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* const made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "vector");
    BIO_meth_set_write(made, AppendToVector);
    BIO_meth_set_ctrl(made, ControlOfVector);
    return made;
  }();
  BIO* const bio = BIO_new(method);
  CHECK(bio != nullptr, "no TLS stream");
  BIO_set_data(bio, to);
  BIO_set_init(bio, 1);
  return bio;
}

SSL_CTX* NewContext() {
  SSL_CTX* const context = SSL_CTX_new(TLS_method());
  CHECK(context != nullptr, "no TLS context");
  return context;
}

// What the peer's alert says of this process's certificate; null: it is about something else.
const char* AlertText(int alert) {
  switch (alert) {
    case SSL_AD_BAD_CERTIFICATE:
      return "it is for another name, not valid yet, or damaged";
    case SSL_AD_CERTIFICATE_EXPIRED:
      return "it has expired";
    case SSL_AD_UNKNOWN_CA:
      return "no authority that it knows has signed it";
    case SSL_AD_CERTIFICATE_REVOKED:
      return "it was revoked";
    case SSL_AD_CERTIFICATE_UNKNOWN:
    case SSL_AD_UNSUPPORTED_CERTIFICATE:
      return "it is not fit for this use";
    case SSL_AD_CERTIFICATE_REQUIRED:
      return "it was not shown one";
    default:
      return nullptr;
  }
}

// A name or an address, of the subjectAltName alone; empty: any.
void Expect(const std::string& name, X509_VERIFY_PARAM* wanted) {
  if (name.empty()) return;
  X509_VERIFY_PARAM_set_hostflags(wanted, X509_CHECK_FLAG_NEVER_CHECK_SUBJECT);
  if (X509_VERIFY_PARAM_set1_ip_asc(wanted, name.c_str()) == 1) return;
  CHECK(X509_VERIFY_PARAM_set1_host(wanted, name.data(), name.size()) == 1);
}

// What is wrong with a certificate, in words that make sense behind "its certificate".
std::string VerdictText(int verdict, const std::string& expected_name) {
  switch (verdict) {
    case X509_V_ERR_HOSTNAME_MISMATCH:
    case X509_V_ERR_IP_ADDRESS_MISMATCH:
      return fmt::format("is not for '{}' (HEDDLE_TLS_NAME)", expected_name);
    case X509_V_ERR_CERT_HAS_EXPIRED:
      return "has expired";
    case X509_V_ERR_CERT_NOT_YET_VALID:
      return "is not valid yet";
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
      return "is not signed by a known authority (HEDDLE_TLS_AUTHORITIES)";
    default:
      return fmt::format("was not accepted: {}", X509_verify_cert_error_string(verdict));
  }
}

}  // namespace

// ---- Contexts

void TlsContext::ContextFree::operator()(ssl_ctx_st* context) const { SSL_CTX_free(context); }

TlsContext::TlsContext(const TlsOptions& options) : options_(options), context_(NewContext()) {
  SSL_CTX* const context = context_.get();
  SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION);
  // The fastest first, where the processor has instructions for it.
  SSL_CTX_set_ciphersuites(
      context, "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256");
  // A connection is one session: nothing to resume, nothing to replay.
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(context, 0);
  SSL_CTX_set_default_passwd_cb(context, NoPassphrase);
  // An authority need not have signed its own certificate.
  X509_VERIFY_PARAM_set_flags(SSL_CTX_get0_param(context), X509_V_FLAG_PARTIAL_CHAIN);
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  ERR_clear_error();
  if (SSL_CTX_use_certificate_chain_file(context, options.certificate.c_str()) != 1) {
    ThrowBadFile("tls_certificate", "HEDDLE_TLS_CERTIFICATE", options.certificate,
                 "a file with a certificate");
  }
  if (SSL_CTX_use_PrivateKey_file(context, options.key.c_str(), SSL_FILETYPE_PEM) != 1) {
    ThrowBadFile("tls_key", "HEDDLE_TLS_KEY", options.key,
                 "a file with the certificate's key, without a passphrase");
  }
  if (SSL_CTX_load_verify_file(context, options.authorities.c_str()) != 1) {
    ThrowBadFile("tls_authorities", "HEDDLE_TLS_AUTHORITIES", options.authorities,
                 "a file with certificates of authorities");
  }
}

std::string TlsContext::OwnProblem() const {
  SSL_CTX* const context = context_.get();
  STACK_OF(X509)* chain = nullptr;
  SSL_CTX_get0_chain_certs(context, &chain);
  for (const bool connects : {true, false}) {
    const std::unique_ptr<X509_STORE_CTX, decltype(&X509_STORE_CTX_free)> check(
        X509_STORE_CTX_new(), X509_STORE_CTX_free);
    // As TLS does at the other end.
    CHECK(X509_STORE_CTX_init(check.get(), SSL_CTX_get_cert_store(context),
                              SSL_CTX_get0_certificate(context), chain) == 1);
    CHECK(X509_STORE_CTX_set_default(check.get(), connects ? "ssl_client" : "ssl_server") == 1);
    X509_VERIFY_PARAM* const wanted = X509_STORE_CTX_get0_param(check.get());
    X509_VERIFY_PARAM_set_auth_level(wanted, SSL_CTX_get_security_level(context));
    CHECK(X509_VERIFY_PARAM_set1(wanted, SSL_CTX_get0_param(context)) == 1);
    Expect(options_.name, wanted);
    if (X509_verify_cert(check.get()) == 1) continue;
    const int verdict = X509_STORE_CTX_get_error(check.get());
    const std::string what =
        verdict == X509_V_ERR_INVALID_PURPOSE
            ? fmt::format("may not be used by processes that {} (keyUsage, extendedKeyUsage)",
                          connects ? "connect" : "listen")
            : VerdictText(verdict, options_.name);
    const bool is_of_authority = X509_STORE_CTX_get_error_depth(check.get()) > 0;
    return is_of_authority ? "is signed by one that " + what : what;
  }
  return {};
}

std::unique_ptr<TlsStream> TlsContext::Connecting(int fd, const std::string& host) const {
  std::unique_ptr<TlsStream> stream(
      new TlsStream(SSL_new(context_.get()), fd, options_.name.empty() ? host : options_.name));
  SSL_set_connect_state(stream->ssl_.get());
  return stream;
}

std::unique_ptr<TlsStream> TlsContext::Accepting(int fd) const {
  std::unique_ptr<TlsStream> stream(new TlsStream(SSL_new(context_.get()), fd, options_.name));
  SSL_set_accept_state(stream->ssl_.get());
  return stream;
}

// ---- Streams

void TlsStream::SslFree::operator()(ssl_st* ssl) const { SSL_free(ssl); }

TlsStream::TlsStream(ssl_st* ssl, int fd, std::string expected_name)
    : fd_(fd), expected_name_(std::move(expected_name)), ssl_(ssl) {
  CHECK(ssl != nullptr, "no TLS stream");
  // The end of the handshake and what follows it leave in two writes: the second shall not wait for
  // the answer to the first.
  const int yes = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  SSL_set_bio(ssl, BIO_new_socket(fd, BIO_NOCLOSE), NewVectorBio(&encrypted_));
  Expect(expected_name_, SSL_get0_param(ssl));
}

TlsStream::State TlsStream::Shake() {
  MutexLock lock(mutex_);
  if (failed_ != 0) return State::kFailed;
  ERR_clear_error();
  const int result = SSL_do_handshake(ssl_.get());
  const int error = result == 1 ? 0 : ErrorLocked(result);
  const int of_sending = SendLocked();  // also the alert that says why it failed
  if (error == EAGAIN && (of_sending == 0 || of_sending == EAGAIN)) return State::kGoing;
  if (result != 1) {
    failed_ = error == EAGAIN ? of_sending : error == 0 ? ECONNRESET : error;
    if (why_.empty()) {
      why_ = fmt::format("it closed during the handshake of TLS: {}", std::strerror(failed_));
    }
    return State::kFailed;
  }
  // From here on much may come at once; a stranger costs less.
  SSL_set_read_ahead(ssl_.get(), 1);
  SSL_set_default_read_buffer_len(ssl_.get(), kReadBytes);
  SSL_free_buffers(ssl_.get());
  return State::kOpen;
}

Transferred TlsStream::Read(const iovec* runs, std::size_t count) {
  MutexLock lock(mutex_);
  ssize_t total = 0;
  for (std::size_t i = 0; i < count; ++i) {
    auto* to = static_cast<char*>(runs[i].iov_base);
    for (std::size_t room = runs[i].iov_len; room > 0;) {
      const auto [bytes, error] = ReadLocked(to, room);
      if (bytes <= 0) return total > 0 ? Transferred{total, 0} : Transferred{bytes, error};
      total += bytes;
      to += bytes;
      room -= static_cast<std::size_t>(bytes);
    }
  }
  return {total, 0};
}

Transferred TlsStream::ReadLocked(char* to, std::size_t bytes) {
  if (failed_ != 0) return {-1, failed_};
  ERR_clear_error();
  std::size_t got = 0;
  const int result = SSL_read_ex(ssl_.get(), to, bytes, &got);
  const int error = result == 1 ? 0 : ErrorLocked(result);  // before another call sets errno
  if (!encrypted_.empty()) SendLocked();                    // also an answer of TLS's own
  if (result == 1) return {static_cast<ssize_t>(got), 0};
  if (error == 0) return {0, 0};
  if (error != EAGAIN) failed_ = error;
  return {-1, error};
}

Transferred TlsStream::Write(const iovec* runs, std::size_t count) {
  MutexLock lock(mutex_);
  if (failed_ != 0) return {-1, failed_};
  if (const int error = SendLocked(); error != 0) return {-1, error};
  // What is shorter than a record is put together first: a record costs some 22 bytes and a call.
  std::array<char, kRecordBytes> record;
  std::size_t filled = 0, total = 0;
  const auto encrypt = [&](const char* from, std::size_t bytes)
                           REQUIRES(mutex_) { return EncryptLocked(from, bytes); };
  for (std::size_t i = 0; i < count && total < kWriteBytes; ++i) {
    const auto* from = static_cast<const char*>(runs[i].iov_base);
    for (std::size_t rest = runs[i].iov_len; rest > 0 && total < kWriteBytes;) {
      const std::size_t bytes = std::min({rest, kRecordBytes - filled, kWriteBytes - total});
      if (filled == 0 && bytes == kRecordBytes) {
        if (!encrypt(from, bytes)) return {-1, failed_};
      } else {
        std::memcpy(record.data() + filled, from, bytes);
        filled += bytes;
        if (filled == kRecordBytes && !encrypt(record.data(), std::exchange(filled, 0))) {
          return {-1, failed_};
        }
      }
      from += bytes;
      rest -= bytes;
      total += bytes;
    }
  }
  if (filled > 0 && !encrypt(record.data(), filled)) return {-1, failed_};
  const int error = SendLocked();
  if (error != 0 && error != EAGAIN) return {-1, error};
  return {static_cast<ssize_t>(total), 0};
}

// Into memory: it never waits.
bool TlsStream::EncryptLocked(const char* from, std::size_t bytes) {
  ERR_clear_error();
  std::size_t taken = 0;
  const int result = SSL_write_ex(ssl_.get(), from, bytes, &taken);
  if (result == 1) {
    DCHECK(taken == bytes);
    return true;
  }
  const int error = ErrorLocked(result);
  failed_ = error == 0 ? EPIPE : error;
  return false;
}

int TlsStream::SendLocked() {
  int error = send_failed_;
  while (sent_ < encrypted_.size() && error == 0) {
    const ssize_t bytes = send(fd_, encrypted_.data() + sent_, encrypted_.size() - sent_,
                               MSG_NOSIGNAL | MSG_DONTWAIT);
    if (bytes >= 0) {
      sent_ += static_cast<std::size_t>(bytes);
    } else if (errno != EINTR) {
      error = errno == EWOULDBLOCK ? EAGAIN : errno;
      if (error != EAGAIN) send_failed_ = error;
    }
  }
  if (sent_ == encrypted_.size()) {
    encrypted_.clear();
    sent_ = 0;
  }
  unsent_.store(error == EAGAIN, std::memory_order_relaxed);
  return error;
}

void TlsStream::Finish() {
  MutexLock lock(mutex_);
  if (failed_ != 0) return;
  ERR_clear_error();
  SSL_shutdown(ssl_.get());
  SendLocked();
}

std::string TlsStream::why() const {
  MutexLock lock(mutex_);
  return why_;
}

bool TlsStream::refused() const {
  MutexLock lock(mutex_);
  return failed_ == EPROTO;
}

int TlsStream::ErrorLocked(int result) {
  const int of_system = errno;
  switch (SSL_get_error(ssl_.get(), result)) {
    case SSL_ERROR_WANT_READ:
    case SSL_ERROR_WANT_WRITE:
      return EAGAIN;
    case SSL_ERROR_ZERO_RETURN:
      return 0;
    case SSL_ERROR_SYSCALL:
      return of_system == 0 ? EndLocked() : of_system;
    default:
      if (ERR_GET_REASON(ERR_peek_last_error()) == SSL_R_UNEXPECTED_EOF_WHILE_READING) {
        return EndLocked();
      }
      if (why_.empty()) why_ = ExplainLocked();
      return EPROTO;
  }
}

// An end that TLS has not announced is that of the process, most likely, unless it was a reset.
int TlsStream::EndLocked() const { return send_failed_ != 0 ? send_failed_ : EPIPE; }

std::string TlsStream::ExplainLocked() const {
  const int reason = ERR_GET_REASON(ERR_peek_last_error());
  if (reason > SSL_AD_REASON_OFFSET) {
    const char* const text = AlertText(reason - SSL_AD_REASON_OFFSET);
    return text != nullptr ? fmt::format("it did not accept this process's certificate: {}", text)
                           : fmt::format("it ended TLS: {}", LastError());
  }
  if (reason == SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE) {
    return "expected a certificate, given none (HEDDLE_TLS_CERTIFICATE)";
  }
  const auto verdict = static_cast<int>(SSL_get_verify_result(ssl_.get()));
  if (verdict == X509_V_OK) return fmt::format("TLS failed: {}", LastError());
  return "its certificate " + VerdictText(verdict, expected_name_);
}

}  // namespace heddle::kvstore::dist
