// Certificates for tests and benchmarks, made by the openssl command in a folder that lives as long
// as the object.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kvstore/dist/transport/tcp/tls.h"
#include "tools/testing/temp_folder.h"

namespace heddle::tools {

class TestCertificates {
 public:
  // With two authorities, "ours" and "theirs".
  TestCertificates() {
    for (const std::string name : {"ours", "theirs"}) {
      Run("req -x509 " + NewKey(name) + " -days 2 -subj /CN=" + name + " -out " + Path(name));
    }
  }
  TestCertificates(const TestCertificates&) = delete;
  TestCertificates& operator=(const TestCertificates&) = delete;

  // Those of the test program, made once: each takes some 20 ms.
  static TestCertificates& Shared() {
    static TestCertificates certificates;
    return certificates;
  }

  // A certificate and its key: `names` as "DNS:localhost,IP:127.0.0.1". Valid for `days`, which may
  // be -1: it has expired.
  kvstore::dist::TlsOptions Make(const std::string& names, const std::string& authority = "ours",
                                 int days = 1) {
    const std::string name = "node" + std::to_string(made_++);
    Run("req -new " + NewKey(name) + " -subj /CN=node -addext subjectAltName=" + names + " -out " +
        Path(name + ".request"));
    Run("x509 -req -in " + Path(name + ".request") + " -CA " + Path(authority) + " -CAkey " +
        Path(authority + ".key") + " -CAcreateserial -copy_extensions copy -days " +
        std::to_string(days) + " -out " + Path(name));
    return {.certificate = Path(name),
            .key = Path(name + ".key"),
            .authorities = Path("ours"),
            .name = {}};
  }
  // For processes of this machine, always the same.
  const kvstore::dist::TlsOptions& right() {
    if (!right_.enabled()) right_ = Make("DNS:localhost,IP:127.0.0.1");
    return right_;
  }

  std::string Path(const std::string& name) const { return folder_ / name; }
  // "openssl <arguments>"
  void Run(const std::string& arguments) const {
    const std::string command = "openssl " + arguments + " > " + Path("output") + " 2>&1";
    if (std::system(command.c_str()) != 0) throw std::runtime_error(command);
  }

 private:
  std::string NewKey(const std::string& name) const {
    return "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout " + Path(name + ".key");
  }

  const TempFolder folder_;
  int made_ = 0;
  kvstore::dist::TlsOptions right_;
};

}  // namespace heddle::tools
