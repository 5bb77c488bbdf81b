// C++ exceptions as the classes of heddle/error.py.
#include <heddle/error.h>

#include <array>
#include <cstring>

#include "python/src/bindings.h"

namespace heddle::python {

namespace {

struct Classes {
  nb::object error, invalid_argument, invalid_type, unknown_key, invalid_state, access, timeout,
      memory, io, network, op, cuda, nccl;
};
Classes* classes = nullptr;  // never freed: the interpreter goes first

// What a message quotes may be no UTF-8.
void Raise(const nb::object& type, const std::exception& error) {
  const char* const what = error.what();
  const auto size = static_cast<Py_ssize_t>(std::strlen(what));
  const nb::object text = nb::steal(PyUnicode_DecodeUTF8(what, size, "replace"));
  if (text.is_valid()) PyErr_SetObject(type.ptr(), text.ptr());
}

// The most derived first. What is not caught here goes to nanobind's own translator.
void Translate(const std::exception_ptr& caught, void*) {
  try {
    std::rethrow_exception(caught);
  } catch (const PyFailure& error) {
    error.Raise();
  } catch (const UnknownKey& error) {
    Raise(classes->unknown_key, error);
  } catch (const InvalidType& error) {
    Raise(classes->invalid_type, error);
  } catch (const InvalidArgument& error) {
    Raise(classes->invalid_argument, error);
  } catch (const InvalidState& error) {
    Raise(classes->invalid_state, error);
  } catch (const AccessError& error) {
    Raise(classes->access, error);
  } catch (const TimeoutError& error) {
    Raise(classes->timeout, error);
  } catch (const OutOfMemory& error) {
    Raise(classes->memory, error);
  } catch (const IoError& error) {
    Raise(classes->io, error);
  } catch (const NetworkError& error) {
    // What ends the others of a job, such as Ctrl-C, is often on its way to this process, too. Or
    // it has come while the store was taken down, and leaves the call.
    if (PyErr_CheckSignals() == 0 && Py_MakePendingCalls() == 0) Raise(classes->network, error);
  } catch (const Interrupted& error) {
    if (Py_MakePendingCalls() == 0) Raise(classes->op, error);  // or raises what leaves the call
  } catch (const OpError& error) {
    Raise(classes->op, error);
  } catch (const CudaError& error) {
    Raise(classes->cuda, error);
  } catch (const NcclError& error) {
    Raise(classes->nccl, error);
  } catch (const Error& error) {
    Raise(classes->error, error);
  }
}

}  // namespace

void BindErrors(nb::module_&) {
  const nb::module_ module = nb::module_::import_("heddle.error");
  const auto find = [&](const char* name) { return nb::getattr(module, name); };
  classes = new Classes{find("Error"),        find("InvalidArgument"), find("InvalidType"),
                        find("UnknownKey"),   find("InvalidState"),    find("AccessError"),
                        find("TimeoutError"), find("OutOfMemory"),     find("IoError"),
                        find("NetworkError"), find("OpError"),         find("CudaError"),
                        find("NcclError")};
  nb::register_exception_translator(&Translate);
}

}  // namespace heddle::python
