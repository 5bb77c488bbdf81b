"""Starts jobs of several processes on this machine, for tests."""

import os
import random
import socket
import subprocess
import sys
import textwrap


def free_port() -> int:
    """One below those that Linux gives to sockets that ask for any: a server that starts before the scheduler might get
    the scheduler's."""
    while True:
        port = random.randrange(10_000, 32_000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue


class Job:
    """Starts the processes of a job on this machine; the environment is that of DMLC launchers."""

    def __init__(self, tmp_path, script, workers=2, servers=1, server_command=None):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(script))
        port = free_port()
        self.processes = {}
        for role, count in (("scheduler", 1), ("server", servers), ("worker", workers)):
            for i in range(count):
                environment = {**os.environ, "DMLC_ROLE": role, "DMLC_PS_ROOT_URI": "127.0.0.1",
                               "DMLC_PS_ROOT_PORT": str(port), "DMLC_NUM_WORKER": str(workers),
                               "DMLC_NUM_SERVER": str(servers), "PYTHONPATH": os.pathsep.join(
                                   [str(tmp_path), os.environ.get("PYTHONPATH", "")])}
                if role == "worker":
                    environment["HEDDLE_RANK"] = str(i)
                command = [sys.executable, str(path)]
                if role == "server" and server_command:
                    command = [sys.executable, *server_command]
                self.processes[f"{role} {i}"] = subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(self, timeout=300):
        """{name: (status, stdout, stderr)}; kills what does not end."""
        ended = {}
        try:
            for name, process in self.processes.items():
                output, errors = process.communicate(timeout=timeout)
                ended[name] = process.returncode, output.strip(), errors
        finally:
            for process in self.processes.values():
                process.kill()
        return ended
